//! A target's life on disk: prepare, partial, publish, discard.

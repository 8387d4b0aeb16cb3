//! A target's life on real files: every rule of prepare, resume, publish and discard, and death at every crash point.

mod bench;
mod life;

//! The life of a job, as a state machine without waiting.

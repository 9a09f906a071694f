//! What training in parallel needs and no tensor library has to know of.
//!
//! Gradients enter here as plain vectors with a parameter's name, and leave as the mean over all replicas. Read it in this order:
//!
//! - [`Mesh`]: named axes over a communicator, such as `dp` × `tp` × `pp`.
//! - [`ParameterList`]: which parameters there are, compared between ranks at the start.
//! - [`Exchange`]: gradients become buckets, and buckets are reduced while backward still runs. [`Reducer`] is the one place that knows how, [`Compressed`] does it through a codec, which [`PhaseIn`] lets begin gently.
//! - [`NotFinite`]: which rank had a NaN, and in which gradient.
//! - [`global_norm`]: one number for a gradient that lies on many ranks.
//! - [`Schedule`]: which micro-batch a pipeline stage works on when, as a list of actions; [`simulate()`] runs such lists in virtual time.
//! - [`Rules`]: settings by parameter name (`*.bias`).

#![forbid(unsafe_code)]

mod compressed;
mod exchange;
mod finite;
mod mesh;
mod norm;
mod parameter_list;
mod phase_in;
mod rules;
mod schedule;
mod simulate;

// What signatures here name.
pub use farwire;

pub use compressed::{Compressed, DENSE_BELOW};
pub use exchange::{Bucket, DENSE, Dense, Exchange, ExchangeError, Part, Reducer, Span, Summary};
pub use finite::{BadElement, Cause, NotFinite};
pub use mesh::{Mesh, MeshError};
pub use norm::{Squares, global_norm};
pub use parameter_list::{Entry, ParameterList, ParameterListError};
pub use phase_in::PhaseIn;
pub use rules::{Rules, matches};
pub use schedule::{Action, Schedule, ScheduleError, Unit, Work};
pub use simulate::{Costs, Deadlock, Timeline, simulate};

//! A deterministic network in virtual time that drives `farwire-proto`.
//!
//! Describe a [`Network`] (latency, bandwidth, jitter, loss, and the [`Trouble`] that befalls it),
//! give each rank its calls, and [`run`](Sim::run). The same description and seed give the same
//! run, frame by frame, on any machine. A run that does not end within its limit is a [`Hang`] that
//! says who waits for whom.
//!
//! ```
//! use farwire_proto::{Call, DType, Peer, ReduceOp};
//! use farwire_sim::{Network, Sim, Submission};
//!
//! let mut sim = Sim::new(Network::lan(3));
//! let call = Call::AllReduce { count: 2, dtype: DType::F32, op: ReduceOp::Sum };
//! let jobs: Vec<_> = (0..3)
//!     .map(|rank| {
//!         let input = bytemuck::cast_slice(&[rank as f32, 1.0]).to_vec();
//!         sim.submit(Peer(rank), Submission::new(call.clone(), input))
//!     })
//!     .collect();
//! let report = sim.run().unwrap();
//! for job in jobs {
//!     let result = report.job(job).result().unwrap();
//!     assert_eq!(result, bytemuck::cast_slice::<f32, u8>(&[3.0, 3.0]));
//! }
//! ```
//!
//! For large worlds the simulator can carry the lengths of payloads rather than their bytes: see
//! [`Sim::carry_lengths`]. To predict how long an operation takes on real machines, say what work
//! costs ([`Costs`], [`CodingSpeeds`]) and which processes share [`Cores`].

#![forbid(unsafe_code)]

mod bound;
pub mod chaos;
pub mod kinds;
mod model;
mod network;
mod node;
pub mod oracle;
mod report;
pub mod script;
mod sim;

pub use bound::lower_bound;
pub use model::{CodedModel, CodingSpeeds};
pub use network::{Cores, Costs, Link, Network, Trouble};
pub use report::{Hang, JobEnd, JobId, JobReport, RankStats, Report};
pub use sim::{Coded, Progress, Sim, Start, Submission};

//! A communication runtime for training models across the networks people actually have.
//!
//! A [`Communicator`] joins this process to the others of its group. Every collective takes a
//! vector, owns it while it is in flight, and returns a [`Pending`]: a `Future` that can also be
//! [`wait`](Pending::wait)ed for. A failed operation returns its input with the error.
//!
//! ```
//! use farwire::ReduceOp;
//!
//! std::thread::scope(|scope| {
//!     for comm in farwire::local(3).expect("shared memory") {
//!         scope.spawn(move || {
//!             let gradient = vec![comm.rank() as f32; 10];
//!             let mean = comm.all_reduce(gradient, ReduceOp::Mean).wait().expect("all ranks are here");
//!             assert_eq!(mean, [1.0; 10]);
//!         });
//!     }
//! });
//! ```

#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("farwire runs on Linux alone: it rests on memfd, futexes and UDP offload");

/// Makes sure that the code in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

mod auto;
mod buffer;
mod calls;
mod coder;
mod comm;
mod completion;
mod compressed;
mod cpu;
pub mod doctor;
mod driver;
mod elastic;
mod error;
mod in_place;
mod join;
mod link;
mod lobby;
mod local;
mod memory;
mod metrics;
mod node;
mod observe;
mod past_caches;
mod pending;
mod policy;
mod process;
mod quic;
mod settings;
mod shm;
mod sync;
mod tcp;
mod team;
mod token;

pub use comm::Communicator;
pub use compressed::{Compressor, Float};
pub use cpu::{cpu_time, thread_cpu_time};
pub use driver::Traffic;
pub use driver::members::MembershipError;
pub use elastic::{Change, Elastic, ElasticState, GroupFault};
pub use error::{Error, SubgroupError};
pub use farwire_codec as codec;
pub use farwire_codec::collective::{CodingError, OrderError, Vectors};
pub use farwire_codec::{
    Codec, CodecSpec, CodedPlace, Context, DecodeError, ErrorFeedback, FeedbackError, Norms, Owed,
    Savepoint, SpecError, Transaction, VectorCodec,
};
pub use farwire_proto::membership::TieRule;
pub use farwire_proto::{
    Algorithm, Call, CallError, Called, CommId, Config, Counts, DType, Element, Epoch, Fault,
    Fingerprint, Kind, OpError, OpSeq, OpenError, Options, Peer, Placement, Rank, ReduceOp,
    SumOrder, Tag, Tuning, UnknownName, WorldSize, tune,
};
pub use in_place::InPlace;
pub use join::beginning::Beginning;
pub use join::env::{EnvError, Place};
pub use join::held_port::HeldPort;
pub use join::rendezvous::JoinError;
pub use link::{LinkChoice, NetworkPath, UnknownLink, link_names};
pub use local::{local, local_on_hosts, local_with};
pub use memory::{Buffer, Memory, MemoryError};
pub use observe::flight;
pub use pending::{Pending, Promise};
pub use policy::{ChoiceError, CodecChoice, CodecPolicy, PolicyError};
pub use settings::{Builder, Preset};
pub use sync::{StateError, StateSync};
pub use token::{Token, TokenError};

/// Reads any bytes as messages from a process of the cluster, as it joins and over TCP. For
/// fuzzing.
#[doc(hidden)]
pub fn read_anything(bytes: &[u8]) {
    join::rendezvous::read_anything(bytes);
    link::negotiation::read_anything(bytes);
    tcp::link::read_anything(bytes);
}

//! What a rank called, small enough to travel in every frame header.

use std::fmt;

use crate::call::Algorithm;
use crate::collective::Kind;
use crate::dtype::{DType, ReduceOp};
use crate::ids::Rank;

/// What one rank called. Ranks that disagree on any field are out of step, and every frame carries
/// all fields, so the first frame between two such ranks shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// The operation.
    pub kind: Kind,
    /// How it moves its data.
    pub algorithm: Algorithm,
    /// Element type; absent for a barrier.
    pub dtype: Option<DType>,
    /// How elements are combined; absent where they are not.
    pub op: Option<ReduceOp>,
    /// Elements of the whole vector; for all-to-all and messages, of what passes from this sender
    /// to this receiver.
    pub count: u64,
    /// The root; absent where all ranks play the same part.
    pub root: Option<Rank>,
    /// Which codec the elements travel through, for which tensor and step; zero for none.
    pub codec: u32,
    /// Elements per frame.
    pub segment: u32,
    /// Digest of what else all must agree on: the members of any group but the world, lengths that
    /// differ from rank to rank ([`Counts::digest`](crate::Counts::digest)), the hosts of a
    /// two-level all-reduce, and, in all-to-all, what the sender expects from this receiver.
    pub layout: u32,
}

impl fmt::Display for Fingerprint {
    /// In words: `all_reduce(sum, f32 × 1000, two-phase)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some(op) = self.op {
            parts.push(op.to_string());
        }
        if self.algorithm == Algorithm::Parcels && self.kind == Kind::Message {
            parts.push("bytes".to_owned());
        } else if let Some(dtype) = self.dtype {
            let pair = if self.kind.is_pairwise() { " between these two" } else { "" };
            parts.push(format!("{dtype} × {}{pair}", self.count));
        }
        if let Some(root) = self.root {
            parts.push(format!("root {}", root.0));
        }
        if self.layout != 0 && !self.kind.is_pairwise() {
            parts.push(format!("layout #{:08x}", self.layout));
        }
        if self.kind.algorithms().len() > 1 {
            parts.push(self.algorithm.to_string());
        }
        if self.codec != 0 {
            parts.push(format!("codec #{:08x}", self.codec));
        }
        write!(f, "{}({})", self.kind, parts.join(", "))
    }
}

impl Fingerprint {
    /// The fields in which two calls differ, in words, for when their short forms read the same.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        let layout = match self.algorithm {
            Algorithm::TwoLevel => "members, or the hosts they are on",
            _ => "members or lengths per rank",
        };
        [
            ("kind", self.kind != other.kind),
            ("algorithm", self.algorithm != other.algorithm),
            ("dtype", self.dtype != other.dtype),
            ("op", self.op != other.op),
            ("count", self.count != other.count),
            ("root", self.root != other.root),
            ("codec (or its tensor or step)", self.codec != other.codec),
            ("segment size", self.segment != other.segment),
            (layout, self.layout != other.layout),
        ]
        .into_iter()
        .filter_map(|(name, differs)| differs.then_some(name))
        .collect()
    }
}

//! From a call to a schedule: everything about an operation that is known before it starts.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::call::{Algorithm, CallError, Options};
use crate::collective::message::End;
use crate::collective::{AnySchedule, Call, Kind};
use crate::dtype::DType;
use crate::fingerprint::Fingerprint;
use crate::ids::{CommId, Rank, Tag, WorldSize};
use crate::parcels::Limits;
use crate::partition::digest;
use crate::placement::{Placement, SumOrder};
use crate::schedule::{InPlace, Incoming, Local, Outcome, Outgoing, Schedule, Slots};
use crate::tune::{self, Links};

/// Frames have at most this many elements, so that their length in bytes fits the header's 32 bits
/// in any type.
const MAX_SEGMENT: usize = 1 << 28;

const SEGMENT_BYTES: NonZeroUsize = NonZeroUsize::new(64 << 10).expect("64 Ki is not zero");
/// Frames grow longer only while a shard still has this many: enough to overlap, and short where
/// many ranks' rings share the cache.
const FRAMES_PER_SHARD: usize = 64;

/// The longest vector, in bytes, for which an all-reduce in place may choose an algorithm that
/// cannot work in place: the result is made beside the vector and copied over it.
const SHORT: usize = 64 << 10;

/// What plans depend on besides the call. All ranks of a job must have the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Bytes per frame, unless [`Options::segment`] says otherwise.
    pub segment_bytes: NonZeroUsize,
    /// The most bytes that a frame of a long vector may have between ranks of one host, where
    /// nobody else shares the way and several threads may work on a frame. Frames are the largest
    /// multiple of [`segment_bytes`](Self::segment_bytes) that fits and leaves enough frames to
    /// overlap.
    pub host_segment_bytes: NonZeroUsize,
    /// What the links are like.
    pub links: Links,
    /// What they are like if all ranks are on one host, where that differs.
    pub host_links: Option<Links>,
    /// The order in which floats are added up where some ranks share a host.
    pub order: SumOrder,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            segment_bytes: SEGMENT_BYTES,
            host_segment_bytes: SEGMENT_BYTES,
            links: Links::default(),
            host_links: None,
            order: SumOrder::default(),
        }
    }
}

impl Tuning {
    /// What the links between ranks with this placement are like.
    pub(crate) fn links_between(&self, placement: &Placement) -> &Links {
        self.host_links.as_ref().filter(|_| placement.hosts() == 1).unwrap_or(&self.links)
    }

    /// Bytes per frame between ranks of one host, for shards of `shard` bytes.
    fn segment_on_host(&self, shard: usize) -> usize {
        let (least, most) = (self.segment_bytes.get(), self.host_segment_bytes.get());
        let times = shard / (least * FRAMES_PER_SHARD);
        least * times.clamp(1, (most / least).max(1))
    }
}

/// One rank's part in one operation, checked.
#[derive(Clone, Debug)]
pub struct Plan {
    comm: CommId,
    me: Rank,
    world: WorldSize,
    fingerprint: Fingerprint,
    way: Way,
    in_place: Option<InPlace>,
    copies_back: bool,
    partner: Option<Partner>,
    deadline: Option<Duration>,
}

/// How the data of an operation travels.
#[derive(Clone, Debug)]
pub(crate) enum Way {
    /// In frames that are all known before it starts.
    Frames(Frames),
    /// In parcels, whose lengths are known only when they are supplied.
    Parcels(Limits),
}

/// Every frame of one rank's part in an operation, known before it starts.
#[derive(Clone, Debug)]
pub struct Frames(pub(crate) AnySchedule);

/// The other end of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partner {
    pub(crate) rank: Rank,
    pub(crate) tag: Tag,
    /// Which end this rank is.
    pub(crate) end: End,
}

impl Plan {
    /// Checks `call` and lays out what rank `me` of `world` does for it, with all ranks on one
    /// host.
    pub fn new(
        comm: CommId,
        me: Rank,
        world: WorldSize,
        call: &Call,
        options: &Options,
        tuning: &Tuning,
    ) -> Result<Self, CallError> {
        Self::placed(comm, me, &Placement::one_host(world), call, options, tuning)
    }

    /// The same for ranks on several hosts.
    pub fn placed(
        comm: CommId,
        me: Rank,
        placement: &Placement,
        call: &Call,
        options: &Options,
        tuning: &Tuning,
    ) -> Result<Self, CallError> {
        let world = placement.world();
        let kind = call.kind();
        let (call, together) = match call {
            Call::InPlace(call) => (&**call, true),
            call => (call, false),
        };
        if !world.contains(me) {
            return Err(CallError::NoSuchRank { what: "this rank,", rank: me, world });
        }
        let terms = call.terms(me, world)?;
        // Parcels are bytes, whatever they stand for.
        let size = if call.is_parcels() { 1 } else { terms.dtype.map_or(1, DType::size) };
        let segment_bytes = if placement.hosts() > 1 || call.is_parcels() {
            tuning.segment_bytes.get()
        } else {
            tuning.segment_on_host(terms.count * size / world.len())
        };
        let segment =
            options.segment.map_or(segment_bytes / size, NonZeroUsize::get).clamp(1, MAX_SEGMENT);
        let algorithm = match (call.is_parcels(), options.algorithm) {
            (true, _) => Algorithm::Parcels,
            (false, Some(algorithm)) if kind.algorithms().contains(&algorithm) => algorithm,
            (false, Some(algorithm)) => return Err(CallError::Algorithm { kind, algorithm }),
            (false, None) => {
                let reduction = terms.dtype.zip(terms.op);
                tune::choose(kind, reduction, terms.count * size, segment * size, placement, tuning)
            }
        };
        let lay_out = |algorithm| {
            let way = call.lay_out(me, placement, algorithm, segment);
            let in_place = match &way {
                Way::Frames(frames) if together => frames.schedule().in_place(),
                _ => None,
            };
            (algorithm, way, in_place)
        };
        // Of the collectives that work in place, all-reduce is the only one with an algorithm that
        // cannot.
        let may_copy = kind == Kind::AllReduce && !call.is_parcels();
        let asked = options.algorithm.is_some() || call.is_parcels();
        let short = may_copy && terms.count * size <= SHORT;
        let (algorithm, way, in_place) = match lay_out(algorithm) {
            (_, _, None) if together && !asked && !short => lay_out(kind.algorithms()[0]),
            laid_out => laid_out,
        };
        let copies_back = together && in_place.is_none();
        if copies_back && !may_copy {
            return Err(CallError::NotInPlace { kind });
        }
        // Ranks that see different hosts would not agree on their frames.
        let hosts = if algorithm == Algorithm::TwoLevel { placement.digest() } else { 0 };
        let plan = Self {
            comm,
            me,
            world,
            fingerprint: Fingerprint {
                kind,
                algorithm,
                dtype: terms.dtype,
                op: terms.op,
                count: terms.count as u64,
                root: terms.root,
                codec: terms.codec,
                segment: segment as u32,
                layout: terms.layout ^ hosts,
            },
            way,
            in_place,
            copies_back,
            partner: match *call {
                Call::Send { to, tag, .. } | Call::SendParcel { to, tag, .. } => {
                    Some(Partner { rank: to, tag, end: End::Sender })
                }
                Call::Recv { from, tag, .. } | Call::RecvParcel { from, tag, .. } => {
                    Some(Partner { rank: from, tag, end: End::Receiver })
                }
                _ => None,
            },
            deadline: options.deadline,
        };
        let fits = |frames| u32::try_from(frames).is_ok();
        let countable = match &plan.way {
            Way::Frames(frames) => {
                plan.others().all(|peer| fits(frames.sends(peer)) && fits(frames.recvs(peer)))
            }
            Way::Parcels(limits) => limits.is_countable(),
        };
        if countable { Ok(plan) } else { Err(CallError::TooLarge { kind }) }
    }

    /// The communicator that the call is made on.
    pub fn comm(&self) -> CommId {
        self.comm
    }

    /// This rank.
    pub fn me(&self) -> Rank {
        self.me
    }

    /// How many ranks take part.
    pub fn world(&self) -> WorldSize {
        self.world
    }

    /// What was called.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The element type; bytes for a barrier, which has none.
    pub fn dtype(&self) -> DType {
        self.fingerprint.dtype.unwrap_or(DType::U8)
    }

    /// Its frames; `None` if it travels in parcels.
    pub fn frames(&self) -> Option<&Frames> {
        match &self.way {
            Way::Frames(frames) => Some(frames),
            Way::Parcels(_) => None,
        }
    }

    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    /// Bytes of the input; none if it travels in parcels.
    pub fn input_bytes(&self) -> usize {
        self.frames().map_or(0, |frames| frames.schedule().input_len() * self.dtype().size())
    }

    /// Bytes of the output; none if it travels in parcels. A rank without a result may need an
    /// output to work in: in a two-phase reduce, for the shard that it owns.
    pub fn output_bytes(&self) -> usize {
        self.frames().map_or(0, |frames| frames.schedule().output_len() * self.dtype().size())
    }

    /// Where the result will be: in no buffer if it travels in parcels.
    pub fn outcome(&self) -> Outcome {
        self.frames().map_or(Outcome::Nothing, |frames| frames.schedule().outcome())
    }

    /// Whether its lanes may be kept abreast of each other. Lanes of parcels may: parcels are
    /// always read, and where all ranks send and receive, none is done before all have called.
    pub(crate) fn keeps_step(&self) -> bool {
        match &self.way {
            Way::Frames(frames) => frames.schedule().keeps_step(),
            Way::Parcels(limits) => limits.sends > 0 && limits.recvs > 0,
        }
    }

    /// Where input and output lie in the memory that they share, if this call works in place.
    pub fn in_place(&self) -> Option<InPlace> {
        self.in_place
    }

    /// Whether the result is made in a buffer of its own and then copied over the input, because
    /// the call is to work in place and the algorithm cannot.
    pub fn copies_back(&self) -> bool {
        self.copies_back
    }

    /// For a plan that works in place: refuses a memory whose length is not what input and output
    /// together need.
    pub fn check_memory(&self, given: usize) -> Result<(), CallError> {
        let InPlace { input, output } = self.in_place.unwrap_or_default();
        let size = self.dtype().size();
        let need = (input * size + self.input_bytes()).max(output * size + self.output_bytes());
        if need == given {
            return Ok(());
        }
        Err(CallError::BufferLength {
            kind: self.fingerprint.kind,
            which: "in-place vector",
            need,
            given,
        })
    }

    /// Refuses a vector of another type than the call's, or any vector if the call travels in
    /// parcels.
    pub fn check_elements(&self, given: DType) -> Result<(), CallError> {
        let Fingerprint { kind, dtype, .. } = self.fingerprint;
        if self.frames().is_some() && dtype.is_none_or(|dtype| dtype == given) {
            return Ok(());
        }
        Err(CallError::Elements { kind, given })
    }

    /// Refuses buffers whose lengths are not the plan's.
    pub fn check_buffers(&self, input: usize, output: usize) -> Result<(), CallError> {
        let lengths =
            [("input", self.input_bytes(), input), ("output", self.output_bytes(), output)];
        match lengths.into_iter().find(|(_, need, given)| need != given) {
            None => Ok(()),
            Some((which, need, given)) => {
                Err(CallError::BufferLength { kind: self.fingerprint.kind, which, need, given })
            }
        }
    }

    /// The ranks this one exchanges frames with, from its right neighbour on.
    pub fn others(&self) -> impl Iterator<Item = Rank> + use<> {
        let partner = self.partner.map(|partner| partner.rank);
        self.world.others(self.me).filter(move |rank| partner.is_none_or(|only| *rank == only))
    }

    /// The same plan in a group. `members` is the digest of its members, on which all must agree;
    /// zero for the world.
    pub(crate) fn in_group(mut self, members: u32) -> Self {
        self.fingerprint.layout ^= members;
        self
    }

    /// The call that this rank reports to `to`.
    pub(crate) fn fingerprint_for(&self, to: Rank) -> Fingerprint {
        match self.pair(to) {
            Some([there, back]) => self.fingerprint_of_pair(there, back),
            None => self.fingerprint,
        }
    }

    /// The call that this rank expects of `from`.
    pub(crate) fn fingerprint_from(&self, from: Rank) -> Fingerprint {
        match self.pair(from) {
            Some([there, back]) => self.fingerprint_of_pair(back, there),
            None => self.fingerprint,
        }
    }

    /// Elements to and from a rank, if only the two ranks know these lengths.
    fn pair(&self, other: Rank) -> Option<[usize; 2]> {
        self.frames().filter(|_| self.fingerprint.kind.is_pairwise())?.schedule().pair(other)
    }

    /// The fingerprint that two ranks compare where only they share the lengths: `there` elements
    /// one way, `back` the other.
    fn fingerprint_of_pair(&self, there: usize, back: usize) -> Fingerprint {
        let layout = self.fingerprint.layout ^ digest(std::iter::once(back as u64));
        Fingerprint { count: there as u64, layout, ..self.fingerprint }
    }

    pub(crate) fn partner(&self) -> Option<Partner> {
        self.partner
    }

    /// Whether it has no deadline: it may take for ever, and nobody waits for it.
    pub fn is_endless(&self) -> bool {
        self.deadline == Some(Duration::MAX)
    }

    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline
    }
}

impl Frames {
    /// How many frames go to a peer.
    pub fn sends(&self, to: Rank) -> usize {
        self.schedule().sends(to)
    }

    /// The `i`-th frame to a peer.
    pub fn send(&self, to: Rank, i: usize) -> Outgoing {
        self.schedule().send(to, i)
    }

    /// How many frames come from a peer.
    pub fn recvs(&self, from: Rank) -> usize {
        self.schedule().recvs(from)
    }

    /// The `i`-th frame from a peer.
    pub fn recv(&self, from: Rank, i: usize) -> Incoming {
        self.schedule().recv(from, i)
    }

    /// Whether a rank's frames are counted in [`Gate::received`](crate::Gate::received).
    pub fn is_upstream(&self, from: Rank) -> bool {
        self.schedule().is_upstream(from)
    }

    /// The rank whose frames are counted in [`Gate::sent`](crate::Gate::sent), if frames are passed
    /// on.
    pub fn downstream(&self) -> Option<Rank> {
        self.schedule().downstream()
    }

    pub(crate) fn local(&self) -> Local {
        self.schedule().local()
    }

    pub(crate) fn slots(&self) -> Slots {
        self.schedule().slots()
    }

    fn schedule(&self) -> &dyn Schedule {
        self.0.get()
    }
}

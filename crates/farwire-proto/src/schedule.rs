//! The vocabulary that collectives are written in.
//!
//! An operation joins this rank to each other rank by a *lane*: an ordered list of frames out and
//! an ordered list of frames in, both known before the operation starts. A frame may have to wait:
//! its [`Gate`] says how far the operation must have come. A collective is then nothing but a pure
//! function from (lane, index) to what that frame carries and when it may move; the
//! [`Engine`](crate::Engine) runs any of them, and a [`Workspace`](crate::Workspace) does their
//! arithmetic.
//!
//! Five rules hold for every schedule, and the tests check them:
//!
//! 1. The frames that a sends to b are the frames that b receives from a, in order and in length.
//! 2. Every lane of a collective carries at least one frame each way. So no rank can finish before
//!    it has heard from every other and compared calls, which is what turns desynchronised ranks
//!    into an error on all of them.
//! 3. A frame's gate never waits on something that waits on the frame, on this rank or around any
//!    cycle of ranks, however few frames a link allows in flight.
//! 4. A fold that keeps its running value in the output emits, if at all, last and at the same
//!    elements, and is complete before the fold of the next segment begins. A fold that reads this
//!    rank's part from the output keeps its running value in a slot, and emits only at the end of a
//!    step.
//! 5. A schedule that works in place overwrites no element of its input until every frame that
//!    carries it has left and every fold that reads it is done, and emits only at the end of a
//!    fold. (The running value itself is then held in a scratch segment, whatever the type.)

use crate::dtype::DType;
use crate::ids::Rank;
use crate::partition::Span;

/// What one rank does in one operation, lane by lane.
pub(crate) trait Schedule {
    /// Elements of the input.
    fn input_len(&self) -> usize;
    /// Elements of the output.
    fn output_len(&self) -> usize;
    /// Where the result will be.
    fn outcome(&self) -> Outcome {
        Outcome::Output
    }

    /// How many frames go to `to`.
    fn sends(&self, to: Rank) -> usize;
    /// The `i`-th frame to `to`.
    fn send(&self, to: Rank, i: usize) -> Outgoing;
    /// How many frames come from `from`.
    fn recvs(&self, from: Rank) -> usize;
    /// The `i`-th frame from `from`.
    fn recv(&self, from: Rank, i: usize) -> Incoming;

    /// Whether a rank's frames are counted in [`Gate::received`].
    fn is_upstream(&self, _from: Rank) -> bool {
        false
    }
    /// The rank whose frames are counted in [`Gate::sent`].
    fn downstream(&self) -> Option<Rank> {
        None
    }
    /// How many elements go to another rank and come from it, where only these two ranks know the
    /// lengths and compare them with each other.
    fn pair(&self, _other: Rank) -> Option<[usize; 2]> {
        None
    }
    /// What this rank does on its own before anything moves.
    fn local(&self) -> Local {
        Local::Nothing
    }
    /// Whether lanes between hosts may be kept abreast of each other: on no rank does one of their
    /// frames wait for another with a higher index.
    fn keeps_step(&self) -> bool {
        false
    }
    /// Where input and output lie if they share one memory; `None` if some frame or fold could
    /// still need input that was overwritten (rule 5).
    fn in_place(&self) -> Option<InPlace> {
        None
    }
    /// How much room partial results need.
    fn slots(&self) -> Slots {
        Slots::default()
    }
}

/// A frame to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// What it carries.
    pub source: Source,
    /// When it may go.
    pub gate: Gate,
}

impl Outgoing {
    /// A frame that carries nothing but its header.
    pub(crate) const HELLO: Self = Self { source: Source::Nothing, gate: Gate::OPEN };

    pub(crate) fn now(source: Source) -> Self {
        Self { source, gate: Gate::OPEN }
    }

    pub(crate) fn after(gate: Gate, source: Source) -> Self {
        Self { source, gate }
    }
}

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nothing: only its header counts.
    Nothing,
    /// Elements of the input.
    Input(Span),
    /// Elements of the input as a partial result: in the accumulator's type.
    InputAsPartial(Span),
    /// Elements of the output.
    Output(Span),
    /// The partial result in a slot.
    Partial {
        /// Which slot.
        slot: usize,
        /// How many elements.
        len: usize,
    },
}

impl Source {
    /// Bytes of the payload.
    pub fn wire_bytes(&self, dtype: DType) -> usize {
        match *self {
            Self::Nothing => 0,
            Self::Input(span) | Self::Output(span) => span.len * dtype.size(),
            Self::InputAsPartial(Span { len, .. }) | Self::Partial { len, .. } => {
                len * dtype.accumulator().size()
            }
        }
    }
}

/// A frame to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// What becomes of its payload.
    pub action: Action,
    /// When it may be taken. Until then it stays in its stream, unread.
    pub gate: Gate,
}

impl Incoming {
    /// A frame that carries nothing but its header.
    pub(crate) const HELLO: Self = Self { action: Action::Nothing, gate: Gate::OPEN };

    pub(crate) fn store(span: Span) -> Self {
        Self { action: Action::Store(span), gate: Gate::OPEN }
    }
}

/// What becomes of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It is empty.
    Nothing,
    /// It is copied to these elements of the output.
    Store(Span),
    /// It is combined with what is there.
    Fold(Fold),
}

impl Action {
    /// Bytes of the payload.
    pub fn wire_bytes(&self, dtype: DType) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Store(span) => span.len * dtype.size(),
            Self::Fold(fold) if fold.partial => fold.len * dtype.accumulator().size(),
            Self::Fold(fold) => fold.len * dtype.size(),
        }
    }
}

/// One step of a reduction: `running ∘= payload`, with this rank's own contribution put in at its
/// place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fold {
    /// Elements of the payload.
    pub len: usize,
    /// Whether the payload is a partial result, in the accumulator's type, rather than a rank's
    /// input.
    pub partial: bool,
    /// Whether this is the first contribution, so that the running value is set rather than
    /// combined.
    pub first: bool,
    /// Whether, and on which side of the payload, this rank's own elements are combined too.
    pub own: Own,
    /// Which result it is a step towards.
    pub level: Level,
    /// Where the running value is kept.
    pub running: Running,
    /// Whether the running value is also a result.
    pub emit: Emit,
}

/// Which result a [`Fold`] is a step towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The combination of one host's ranks. It is rounded to the element type where it is emitted,
    /// but a mean is not divided yet. Counted in [`Gate::host_folded`].
    Host,
    /// The result. Counted in [`Gate::folded`].
    All,
}

/// The place of this rank's own elements in a [`Fold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// Not in this step.
    No,
    /// `own ∘ payload`; only in the first step.
    Before(Mine),
    /// `(running ∘ payload) ∘ own`.
    After(Mine),
}

/// Where this rank's own elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mine {
    /// In its input.
    Input(Span),
    /// In its output: what a fold of [`Level::Host`] has left there.
    Output(Span),
}

/// Where a reduction's running value is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Running {
    /// In the output, at the elements where the result will be; if the accumulator's type is wider,
    /// in a scratch segment until then.
    Output(Span),
    /// In a slot: it will be sent on from there, or the output holds this rank's part.
    Slot(usize),
}

/// When a reduction's running value is written to the output as a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emit {
    /// Not in this step.
    No,
    /// After the payload, before this rank's own elements.
    BeforeOwn(Span),
    /// At the end of the step.
    Last(Span),
}

/// Where input and output lie in the one memory that they share, in elements from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InPlace {
    /// Where the input starts.
    pub input: usize,
    /// Where the output starts.
    pub output: usize,
}

/// Where an operation's result is once it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// In the output.
    Output,
    /// In the input, which is its own result: at the root of a broadcast.
    Input,
    /// Nowhere: this rank gets none. (Its output, if it has any, was room to work in.)
    Nothing,
}

/// What a rank does on its own before anything moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Local {
    /// Nothing.
    Nothing,
    /// Copies a block of the input to its place in the output.
    Copy {
        /// In the input.
        from: Span,
        /// In the output.
        to: Span,
    },
    /// The input is the whole result: on a rank alone, or on the first of a scan.
    InputIsResult,
    /// Fills the output with the operator's identity.
    Identity,
}

/// Room for partial results on their way through this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    /// How many.
    pub(crate) count: usize,
    /// Elements in each, in the accumulator's type.
    pub(crate) len: usize,
}

/// How far an operation has come on this rank; or, as a gate, how far it must have come before a
/// frame may move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gate {
    /// Frames folded into results, from anyone.
    pub folded: usize,
    /// Frames folded into the combination of this rank's host.
    pub host_folded: usize,
    /// Frames received from the schedule's upstream ranks.
    pub received: usize,
    /// Frames sent to the schedule's downstream rank.
    pub sent: usize,
}

impl Gate {
    /// Nothing to wait for.
    pub const OPEN: Self = Self { folded: 0, host_folded: 0, received: 0, sent: 0 };

    /// Each counter, always in the same order.
    pub(crate) fn counters(&self) -> [usize; 4] {
        let Self { folded, host_folded, received, sent } = *self;
        [folded, host_folded, received, sent]
    }

    pub(crate) fn after_folds(folded: usize) -> Self {
        Self { folded, ..Self::OPEN }
    }

    pub(crate) fn after_receipts(received: usize) -> Self {
        Self { received, ..Self::OPEN }
    }
}

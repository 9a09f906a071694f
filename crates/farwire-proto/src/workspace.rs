//! Acting on what the engine decided: the bytes of one operation.

use std::ops::Range;

use crate::arith::{Arithmetic, Operand};
use crate::call::Algorithm;
use crate::dtype::DType;
use crate::partition::Span;
use crate::plan::{Frames, Plan};
use crate::schedule::{Action, Emit, Fold, InPlace, Level, Local, Mine, Own, Running, Source};
use crate::team::{self, Teamed};

/// The arithmetic of one operation on one rank, and the scratch space it needs.
///
/// The input is only read, so a failed operation leaves it as it was. Input and output stay with
/// the driver, which lends them whole to each call; their lengths must be the plan's
/// ([`Plan::check_buffers`]).
///
/// Call [`begin`](Self::begin) once, before anything else, [`payload`](Self::payload) for each
/// [`Transmit`](crate::Transmit), and [`apply`](Self::apply) for each [`Take`](crate::Take).
///
/// A plan that works [in place](Plan::in_place) has one memory instead of the two, and needs no
/// `begin`: see [`payload_in_place`](Self::payload_in_place) and
/// [`apply_in_place`](Self::apply_in_place).
#[derive(Debug)]
pub struct Workspace {
    dtype: DType,
    arithmetic: Option<Arithmetic>,
    team: Teamed,
    local: Local,
    in_place: InPlace,
    /// The output is so long that what is stored there leaves the caches before anybody reads it.
    is_long: bool,
    /// Partial results that wait to be sent on, in the accumulator's type.
    slots: Vec<u8>,
    slot_bytes: usize,
    /// One segment in the accumulator's type: the running value of a reduction, where that type is
    /// wider than the elements, or input and output are one memory.
    wide: Vec<u8>,
    /// The same, for input on its way out as a partial result.
    staging: Vec<u8>,
}

/// A result of this many bytes is longer than a core's share of the caches. It is stored past them,
/// unless what is stored is soon sent on, as by trees, chains, rings and between hosts.
const PAST_CACHES: usize = 16 << 20;

/// The allocations of a [`Workspace`] that has ended, for another.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    slots: Vec<u8>,
    wide: Vec<u8>,
    staging: Vec<u8>,
}

impl Workspace {
    /// Scratch space for `plan`. Slots are allocated here; a segment's worth more on first use,
    /// where it is needed.
    pub fn new(plan: &Plan) -> Self {
        Self::with_scratch(plan, Scratch::default(), None)
    }

    /// The same, with the allocations that another has [left](Self::into_scratch), and a team.
    pub(crate) fn with_scratch(plan: &Plan, scratch: Scratch, team: Teamed) -> Self {
        let Scratch { slots: mut room, wide, staging } = scratch;
        let dtype = plan.dtype();
        let accumulator = dtype.accumulator();
        let slots = plan.frames().map(Frames::slots).unwrap_or_default();
        let slot_bytes = slots.len * accumulator.size();
        room.clear();
        room.resize(slots.count * slot_bytes, 0);
        Self {
            dtype,
            arithmetic: plan.fingerprint().op.map(|op| Arithmetic {
                dtype,
                op,
                ranks: plan.world().get(),
                team,
            }),
            team,
            local: plan.frames().map_or(Local::Nothing, Frames::local),
            in_place: plan.in_place().unwrap_or_default(),
            is_long: plan.output_bytes() >= PAST_CACHES
                && matches!(plan.fingerprint().algorithm, Algorithm::TwoPhase | Algorithm::Direct),
            slots: room,
            slot_bytes,
            wide,
            staging,
        }
    }

    /// Its allocations, for another.
    pub(crate) fn into_scratch(self) -> Scratch {
        Scratch { slots: self.slots, wide: self.wide, staging: self.staging }
    }

    /// Does the part of the operation that needs no other rank.
    pub fn begin(&mut self, input: &[u8], output: &mut [u8]) {
        match self.local {
            Local::Nothing => {}
            Local::Copy { from, to } => {
                output[to.bytes(self.dtype)].copy_from_slice(&input[from.bytes(self.dtype)]);
            }
            Local::InputIsResult => {
                // Every operator returns a single operand as it is; the other case, rank 0 of a
                // scan, has no mean.
                output.copy_from_slice(input);
            }
            Local::Identity => self.reduction().identity(output),
        }
    }

    /// What a frame carries: a slice of the buffers wherever the bytes are already there in the
    /// form they travel in.
    pub fn payload<'a>(
        &'a mut self,
        source: &Source,
        input: &'a [u8],
        output: &'a [u8],
    ) -> &'a [u8] {
        match *source {
            Source::Nothing => &[],
            Source::Input(span) => &input[span.bytes(self.dtype)],
            Source::Output(span) => &output[span.bytes(self.dtype)],
            Source::Partial { slot, len } => {
                let start = slot * self.slot_bytes;
                &self.slots[start..start + len * self.dtype.accumulator().size()]
            }
            Source::InputAsPartial(span) => {
                let elements = &input[span.bytes(self.dtype)];
                if !self.widens() {
                    return elements;
                }
                let arithmetic = self.reduction();
                self.staging.resize(span.len * self.dtype.accumulator().size(), 0);
                arithmetic.set(&mut self.staging, Operand::Elements(elements));
                &self.staging
            }
        }
    }

    /// Puts a payload where it belongs.
    ///
    /// # Panics
    ///
    /// If the payload is not as long as the frame's header says, which the engine has checked.
    pub fn apply(&mut self, action: &Action, payload: &[u8], input: &[u8], output: &mut [u8]) {
        assert_eq!(
            payload.len(),
            action.wire_bytes(self.dtype),
            "a payload is as long as its header says"
        );
        match action {
            Action::Nothing => {}
            Action::Store(span) => {
                let target = &mut output[span.bytes(self.dtype)];
                if self.is_long {
                    team::copy_past_caches(self.team, target, payload);
                } else {
                    team::copy(self.team, target, payload);
                }
            }
            Action::Fold(fold) => self.fold(fold, payload, input, output),
        }
    }

    /// What a frame carries, where input and output are one memory.
    pub fn payload_in_place<'a>(&'a mut self, source: &Source, memory: &'a [u8]) -> &'a [u8] {
        let size = self.dtype.size();
        let InPlace { input, output } = self.in_place;
        self.payload(source, &memory[input * size..], &memory[output * size..])
    }

    /// Puts a payload where it belongs, where input and output are one memory.
    ///
    /// # Panics
    ///
    /// As [`apply`](Self::apply).
    pub fn apply_in_place(&mut self, action: &Action, payload: &[u8], memory: &mut [u8]) {
        let size = self.dtype.size();
        let InPlace { input, output } = self.in_place;
        let Action::Fold(fold) = action else {
            return self.apply(action, payload, &[], &mut memory[output * size..]);
        };
        assert_eq!(
            payload.len(),
            action.wire_bytes(self.dtype),
            "a payload is as long as its header says"
        );
        let (arithmetic, dtype) = (self.reduction_of(fold), self.dtype);
        let payload =
            if fold.partial { Operand::Partial(payload) } else { Operand::Elements(payload) };
        let place = |held: Mine| match held {
            Mine::Input(span) => offset(input * size, span.bytes(dtype)),
            Mine::Output(span) => offset(output * size, span.bytes(dtype)),
        };
        if let (Emit::Last(span), Running::Output(_), false) =
            (fold.emit, fold.running, self.widens())
        {
            let result = place(Mine::Output(span));
            let beside = match fold.own {
                Own::No => false,
                Own::Before(held) | Own::After(held) => place(held) != result,
            };
            if !beside {
                return self.end_in_place(fold, payload, &mut memory[result]);
            }
        }
        let own = |held: Mine| Operand::Elements(&memory[place(held)]);
        let running = self.running(fold);
        advance(arithmetic, fold, running, payload, own, |_, _| ());
        // Nothing of this fold is read again, so its result may take the place of this rank's
        // elements.
        match fold.emit {
            Emit::No => {}
            Emit::Last(span) => {
                arithmetic.finish(&mut memory[output * size..][span.bytes(dtype)], running);
            }
            Emit::BeforeOwn(_) => unreachable!("rule 5 of schedules"),
        }
    }

    /// The last step of a fold whose result takes the place of this rank's elements, or of elements
    /// that nobody needs. It goes straight there, not by way of the scratch segment.
    fn end_in_place(&mut self, fold: &Fold, payload: Operand<'_>, result: &mut [u8]) {
        let arithmetic = self.reduction_of(fold);
        match (fold.first, fold.own) {
            (true, Own::No) => arithmetic.set(result, payload),
            (true, Own::Before(_)) => arithmetic.fold(result, payload),
            (true, Own::After(_)) => arithmetic.fold_in_front(result, payload),
            (false, Own::No) => {
                arithmetic.combine(result, Operand::Partial(self.running(fold)), payload);
            }
            (false, Own::After(_)) => {
                let running = self.running(fold);
                arithmetic.fold(running, payload);
                arithmetic.fold_in_front(result, Operand::Partial(running));
            }
            (false, Own::Before(_)) => {
                unreachable!("own elements come before only the first payload")
            }
        }
        arithmetic.finish_in_place(result);
    }

    /// The place of a running value that is not in the output itself.
    fn running(&mut self, fold: &Fold) -> &mut [u8] {
        let bytes = fold.len * self.dtype.accumulator().size();
        match fold.running {
            Running::Output(_) => {
                self.wide.resize(bytes, 0);
                &mut self.wide[..]
            }
            Running::Slot(slot) => &mut self.slots[slot * self.slot_bytes..][..bytes],
        }
    }

    fn fold(&mut self, fold: &Fold, payload: &[u8], input: &[u8], output: &mut [u8]) {
        let arithmetic = self.reduction_of(fold);
        let dtype = self.dtype;
        let own = |held: Mine| match held {
            Mine::Input(span) => Operand::Elements(&input[span.bytes(dtype)]),
            Mine::Output(_) => unreachable!("rule 4 of schedules"),
        };
        let payload =
            if fold.partial { Operand::Partial(payload) } else { Operand::Elements(payload) };

        // The running value is in the output itself, in the one wide segment, or in a slot; only
        // the last two can be borrowed beside the output.
        if let Own::Before(Mine::Output(_)) | Own::After(Mine::Output(_)) = fold.own {
            let own = |held: Mine| match held {
                Mine::Input(span) => Operand::Elements(&input[span.bytes(dtype)]),
                Mine::Output(span) => Operand::Elements(&output[span.bytes(dtype)]),
            };
            let running = self.running(fold);
            advance(arithmetic, fold, running, payload, own, |_, _| ());
            if let Emit::Last(span) = fold.emit {
                arithmetic.finish(&mut output[span.bytes(dtype)], running);
            }
        } else if let (Running::Output(span), false) = (fold.running, self.widens()) {
            debug_assert!(
                matches!(fold.emit, Emit::No) || fold.emit == Emit::Last(span),
                "rule 4 of schedules"
            );
            let running = &mut output[span.bytes(dtype)];
            advance(arithmetic, fold, running, payload, own, |_, _| ());
            if matches!(fold.emit, Emit::Last(_)) {
                arithmetic.finish_in_place(running);
            }
        } else {
            let running = self.running(fold);
            advance(arithmetic, fold, running, payload, own, |span, running| {
                arithmetic.finish(&mut output[span.bytes(dtype)], running);
            });
        }
    }

    /// Whether running values are held in a wider type than the elements'.
    fn widens(&self) -> bool {
        self.dtype != self.dtype.accumulator()
    }

    /// The arithmetic of a step: the combination of a host is only a part of a mean.
    fn reduction_of(&self, fold: &Fold) -> Arithmetic {
        match fold.level {
            Level::Host => self.reduction().undivided(),
            Level::All => self.reduction(),
        }
    }

    fn reduction(&self) -> Arithmetic {
        self.arithmetic.expect("only schedules of reducing calls ask for arithmetic")
    }
}

fn offset(start: usize, bytes: Range<usize>) -> Range<usize> {
    start + bytes.start..start + bytes.end
}

/// `running ∘= payload`, with this rank's own elements at their place, handing results to `emit` as
/// the step says. Two operands are combined in one pass where nothing comes between them.
fn advance<'a>(
    arithmetic: Arithmetic,
    fold: &Fold,
    running: &mut [u8],
    payload: Operand<'_>,
    own: impl Fn(Mine) -> Operand<'a>,
    mut emit: impl FnMut(Span, &[u8]),
) {
    let own_after = match (fold.own, fold.emit) {
        (Own::Before(held), _) => {
            debug_assert!(fold.first, "own elements come before only the first payload");
            arithmetic.combine(running, own(held), payload);
            None
        }
        (Own::After(held), Emit::No | Emit::Last(_)) if fold.first => {
            arithmetic.combine(running, payload, own(held));
            None
        }
        (own, _) => {
            if fold.first {
                arithmetic.set(running, payload);
            } else {
                arithmetic.fold(running, payload);
            }
            match own {
                Own::After(held) => Some(held),
                _ => None,
            }
        }
    };
    if let Emit::BeforeOwn(span) = fold.emit {
        emit(span, running);
    }
    if let Some(held) = own_after {
        arithmetic.fold(running, own(held));
    }
    if let Emit::Last(span) = fold.emit {
        emit(span, running);
    }
}

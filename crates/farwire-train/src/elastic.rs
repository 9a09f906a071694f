//! A trainer whose ranks come and go: the state of an [`Elastic`](farwire::Elastic) job.
//!
//! Ranks with the same share of the model have the same bits. When the group changes, all ranks
//! tell each other what they have, [work out](crate::seats) which rank takes which place, and lay
//! the mesh out anew:
//!
//! ```text
//!  standing of all ─▶ last step counts? ─▶ residuals ─▶ seats ─▶ mesh, model ─▶ state, over dp
//! ```
//!
//! **A step counts on all ranks or on none.** In the last collective of a step all ranks agree that
//! it counts. If any rank has the result of that collective, all have called it. So all have their
//! mean gradients and the norm, and can make the update as soon as they hear that the step counts.
//! No rank has to send its state for that, and no share of the model is left a step behind.
//!
//! The batch stays as long as was asked for, or as close to that as can be shared evenly, and the
//! learning rate stays as it is. Data come in the order in which they would without changes: the
//! number of sequences learned from is part of the state.

use farwire::{CodecChoice, Communicator, ElasticState, ErrorFeedback, ReduceOp, StateSync};

use crate::adamw::Moments;
use crate::carry;
use crate::corpus::Batches;
use crate::error::TrainError;
use crate::exchange::Reducer;
use crate::group::Group;
use crate::library::Library;
use crate::mesh::Mesh;
use crate::parameter_list::ParameterList;
use crate::seats::{self, Seat};
use crate::settings::Settings;
use crate::trainer::{Place, Share, Trainer, exchange};

/// What a trainer needs to change places.
pub(crate) struct Seating {
    library: &'static dyn Library,
    /// Every rank's place.
    seats: Vec<Option<Seat>>,
    /// This rank's place.
    seat: Option<Seat>,
    /// The share of the model that this rank has built.
    made: Option<usize>,
    /// The place whose state this rank has, and the revision of that state. A rank that waits keeps
    /// its state: it may be needed until the others have made a step without it.
    held: Option<(Seat, u64)>,
}

/// What a rank says about itself when the group has changed.
#[derive(Clone, Copy, Debug)]
struct Standing {
    held: Option<Seat>,
    /// Of the state that it has.
    revision: u64,
    /// Whether it can still make the next update, if that step counts elsewhere.
    is_open: bool,
    counters: [u64; COUNTERS],
}

const COUNTERS: usize = 6;
/// How many numbers make a standing.
const WORDS: usize = 4 + COUNTERS;

impl Standing {
    fn words(self) -> Vec<u64> {
        let replica = self.held.map_or(0, |seat| seat.replica as u64 + 1);
        let share = self.held.map_or(0, |seat| seat.share as u64);
        let mut words = vec![replica, share, self.revision, self.is_open.into()];
        words.extend(self.counters);
        words
    }

    fn of([replica, share, revision, is_open, counters @ ..]: [u64; WORDS]) -> Self {
        let seat = |replica: u64| Seat { replica: replica as usize, share: share as usize };
        let held = replica.checked_sub(1).map(seat);
        Self { held, revision, is_open: is_open == 1, counters }
    }

    /// The place whose state it has at this revision, or can have by ending its open step.
    fn held_at(&self, revision: u64) -> Option<Seat> {
        let next = self.revision.checked_add(u64::from(self.is_open));
        self.held.filter(|_| self.revision == revision || next == Some(revision))
    }
}

/// Reads arbitrary bytes as what ranks say about themselves, and gives the ranks their places. For
/// fuzzing.
///
/// # Panics
///
/// If two ranks get the same place, or fewer ranks get one than could.
pub(crate) fn read_anything(bytes: &[u8]) {
    let [shares, start, rest @ ..] = bytes else { return };
    let (shares, is_start) = (1 + usize::from(shares % 4), start % 2 == 1);
    // One byte per number, so that ranks often have equal ones.
    let words: Vec<u64> = rest.iter().map(|byte| u64::from(*byte)).collect();
    let said: Vec<_> = words.as_chunks().0.iter().map(|words| Standing::of(*words)).collect();
    let revision = said.iter().map(|one| one.revision).max().unwrap_or(0);
    let held: Vec<_> = said.iter().map(|one| one.held_at(revision)).collect();
    if let Ok(seats) = seats::assign(shares, &held, is_start) {
        let mut taken: Vec<_> = seats.iter().flatten().collect();
        taken.sort();
        taken.dedup();
        assert_eq!(taken.len(), held.len() / shares * shares, "{held:?}: {seats:?}");
    }
}

impl Trainer {
    /// A trainer for a job whose ranks come and go, whether this process is there from the start or
    /// joins later. It is the state of an [`Elastic`](farwire::Elastic), whose first step gives it
    /// a place. `settings.dp` is not used: there are as many replicas as the ranks can make.
    ///
    /// Fails if ranks cannot come and go with these settings.
    pub fn elastic(
        library: &'static dyn Library,
        settings: Settings,
        text: &[u8],
    ) -> Result<Self, TrainError> {
        let settings = Settings { dp: 1, ..settings };
        settings.check()?;
        let wrong = |text: &str| Err(TrainError::Settings(text.to_owned()));
        if settings.shard_optimizer {
            return wrong(
                "an elastic run cannot shard its optimizer: a rank that is lost would take the only \
                 copy of its share of the moments with it; leave --shard-optimizer out",
            );
        }
        let CodecChoice::Given(codec) = settings.codec.clone() else {
            return wrong(
                "an elastic run needs a codec by its name: what `auto` measures depends on who is \
                 there; choose one with --codec",
            );
        };
        let batches = Batches::new(text, settings.seed, settings.model.context, settings.batch)?;
        let alone = farwire::local(1)?.remove(0);
        let mesh = Mesh::new(&alone, [("pp", 1), ("dp", 1), ("tp", 1)])?;
        let (share, memory) = (Share::nothing()?, library.memory());
        let mut trainer = Self::with_share(settings, mesh, share, codec.into(), batches, memory)?;
        trainer.seating =
            Some(Seating { library, seats: vec![None], seat: None, made: None, held: None });
        Ok(trainer)
    }

    /// Whether this rank has a part of the model. In an elastic run with tensor or pipeline
    /// parallelism it has none while it waits for enough ranks to make a whole replica.
    pub fn has_place(&self) -> bool {
        self.seating.as_ref().is_none_or(|seating| seating.seat.is_some())
    }

    /// How many ranks wait for more ranks, to make a whole replica together.
    pub fn waiting(&self) -> usize {
        let seats = self.seating.iter().flat_map(|seating| &seating.seats);
        seats.filter(|seat| seat.is_none()).count()
    }

    /// Whether this is the first of the ranks that have a part of the model: the one that reports,
    /// and writes checkpoints.
    pub fn is_first(&self) -> bool {
        self.has_place() && self.mesh().world().rank() == 0
    }

    fn seating(&mut self) -> Result<&mut Seating, TrainError> {
        let only = || TrainError::Settings("ranks come and go with `Trainer::elastic` only".into());
        self.seating.as_mut().ok_or_else(only)
    }

    fn counters(&self) -> [u64; COUNTERS] {
        let [skipped, in_a_row] = [self.skipped as u64, self.skipped_in_a_row as u64];
        let (owed, lost) = (self.owed.to_bits(), self.lost_at(self.step as u64).to_bits());
        [skipped, in_a_row, self.seen, self.adam.steps().into(), owed, lost]
    }

    fn set_counters(&mut self, revision: u64, counters: [u64; COUNTERS]) {
        let [skipped, in_a_row, seen, _updates, owed, lost] = counters;
        (self.skipped, self.skipped_in_a_row) = (skipped as usize, in_a_row as usize);
        (self.seen, self.owed) = (seen, f64::from_bits(owed));
        self.lost = (revision, f64::from_bits(lost));
        self.step = revision as usize;
    }

    /// The norm of the residuals lost with ranks since this revision began.
    fn lost_at(&self, revision: u64) -> f64 {
        if self.lost.0 == revision { self.lost.1 } else { 0.0 }
    }

    /// Ends the last step as it ended on the other ranks, which are now at this revision: it counts
    /// here too, or is rolled back.
    fn settle(&mut self, revision: u64, counters: [u64; COUNTERS]) -> Result<(), TrainError> {
        let counts = self.step as u64 + 1 == revision && counters[0] == self.skipped as u64;
        match self.open.take().filter(|_| counts && self.has_place()) {
            Some(norm) => {
                self.exchange.commit();
                self.update(norm)?;
            }
            None => self.exchange.roll_back(),
        }
        self.set_counters(revision, counters);
        Ok(())
    }

    /// Ranks that do not keep their share pass its residuals on to a rank that also has it and
    /// keeps it. All ranks call this, with the seats before and after the change.
    fn pass_residuals_on(
        &mut self,
        world: &Communicator,
        held: &[Option<Seat>],
        seats: &[Option<Seat>],
    ) -> Result<(), TrainError> {
        let Some(mine) = self.exchange.reducer().feedback() else { return Ok(()) };
        mine.reshard().map_err(farwire::Error::from)?;
        let share = |of: &[Option<Seat>], rank: usize| of[rank].map(|seat| seat.share);
        let keeps = |rank: usize| held[rank].is_some() && share(held, rank) == share(seats, rank);
        let mut passed_on = held[world.rank()].is_none();
        let mut pass_on = |rank: usize, heir: usize| {
            if rank == world.rank() {
                passed_on = true;
                carry::send_bytes(world, heir, mine.to_bytes())?;
            } else if heir == world.rank() {
                let theirs = ErrorFeedback::from_bytes(&carry::receive_bytes(world, rank)?);
                let theirs = theirs.map_err(farwire::Error::from)?;
                mine.take_over(theirs).map_err(farwire::Error::from)?;
            }
            Ok(())
        };
        let moved = (0..held.len()).filter(|rank| held[*rank].is_some() && !keeps(*rank));
        let heir = |rank: &usize| {
            let fits = |heir: &usize| keeps(*heir) && share(held, *heir) == share(held, *rank);
            (0..held.len()).find(fits)
        };
        let mut pairs = moved.filter_map(|rank| Some((rank, heir(&rank)?)));
        let result = pairs.try_for_each(|(rank, heir)| pass_on(rank, heir));
        // Even if that failed: residuals that may have arrived must not be sent again.
        if passed_on {
            self.exchange.reducer_mut().restore(ErrorFeedback::new());
        }
        result
    }

    /// Takes this rank's place: lays out the mesh, and builds the share of the model that it needs,
    /// unless it has built that share before.
    fn take_place(
        &mut self,
        world: &Communicator,
        seats: Vec<Option<Seat>>,
    ) -> Result<(), TrainError> {
        let Settings { tp, pp, micro_batches, .. } = self.settings;
        let replicas = seats.len() / (tp * pp);
        let parts = replicas * micro_batches;
        self.settings.dp = replicas;
        self.settings.batch = (self.asked_batch / parts * parts).max(parts);
        self.settings.check()?;
        let me = world.rank();
        let seat = seats[me];
        // Each rank that waits is on its own.
        let (color, key) = match seat {
            Some(Seat { replica, share }) => {
                (0, (share / tp * replicas + replica) * tp + share % tp)
            }
            None => (1 + me, 0),
        };
        let team = world.split(color as u32, key as u32)?;
        let axes = if seat.is_some() { [pp, replicas, tp] } else { [1; 3] };
        self.mesh = Mesh::new(&team, [("pp", axes[0]), ("dp", axes[1]), ("tp", axes[2])])?;

        let seating = self.seating()?;
        (seating.seats, seating.seat) = (seats, seat);
        let (library, made) = (seating.library, seating.made);
        let feedback = match self.exchange.reducer().feedback() {
            Some(feedback) => {
                let copy = ErrorFeedback::from_bytes(&feedback.to_bytes());
                Some(copy.map_err(farwire::Error::from)?)
            }
            None => None,
        };
        let Some(Seat { share, .. }) = seat else {
            // The state that it keeps is of a replica that no longer exists.
            let seating = self.seating()?;
            if let Some((held, _)) = &mut seating.held {
                held.replica = replicas + me;
            }
            let nothing = ParameterList::new([])?;
            self.exchange =
                exchange(&self.settings, &self.mesh, &nothing, &self.codec, &self.memory)?;
            return Ok(());
        };
        if made == Some(share) {
            self.tensor.replace(self.mesh.of("tp"));
            self.pipeline.relink(&Group::of(self.mesh.of("pp")), self.settings.passed());
        } else {
            // Whatever happens from here on, the state that it had is gone.
            self.seating()?.held = None;
            self.seating()?.made = None;
            let new = Share::new(library, &self.settings, &self.mesh)?;
            (self.tensor, self.pipeline) = (new.tensor, new.pipeline);
            (self.plan, self.params) = (new.plan, new.params);
            self.adam.restore(0, []);
            self.seating()?.made = Some(share);
        }
        if let Some(feedback) = &feedback {
            self.share_residuals(feedback)?;
        }
        self.exchange =
            exchange(&self.settings, &self.mesh, &self.plan, &self.codec, &self.memory)?;
        if let Some(feedback) = feedback {
            self.exchange.reducer_mut().restore(feedback);
        }
        Ok(())
    }

    /// Parameters of which every rank of tp has a copy must stay the same on all of them, and so
    /// must their residuals. The ranks may come from different replicas, so the first rank's
    /// residuals count.
    fn share_residuals(&self, mine: &ErrorFeedback) -> Result<(), TrainError> {
        let Some(comm) = self.tensor.communicator() else { return Ok(()) };
        let is_cut = |name: &str| self.params.get(name).is_some_and(|it| it.param.cut.is_some());
        // Keeps the residuals of cut parameters only, or those of whole parameters only.
        let keep = |feedback: &ErrorFeedback, cut: bool| {
            let mut others = feedback.names().into_iter().filter(|name| is_cut(name) != cut);
            others.try_for_each(|name| feedback.remove(&name))
        };
        let whole = ErrorFeedback::from_bytes(&mine.to_bytes()).map_err(farwire::Error::from)?;
        keep(&whole, false).map_err(farwire::Error::from)?;
        keep(mine, true).map_err(farwire::Error::from)?;
        let first = (comm.rank() == 0).then(|| whole.to_bytes());
        let first = ErrorFeedback::from_bytes(&carry::broadcast_bytes(&comm, first)?);
        let taken = first.and_then(|first| mine.take_over(first));
        Ok(taken.map_err(farwire::Error::from)?)
    }

    /// Gives ranks with the same share the same state. Returns whether this rank has received it,
    /// and whether it had a different state of the same revision.
    fn share_state(&mut self, revision: u64, has_it: bool) -> Result<[bool; 2], TrainError> {
        let mut saved = ElasticState::save(self);
        let sync = {
            let mut buffers: Vec<(&str, &mut [u8])> =
                saved.iter_mut().map(|(name, buffer)| (&name[..], &mut buffer[..])).collect();
            // A new rank is behind, even before the first step.
            let revision = if has_it { revision.saturating_add(1) } else { 0 };
            self.mesh.of("dp").sync_state(revision, &mut buffers)?
        };
        let me = self.mesh.coordinate("dp");
        if sync.receivers.contains(&me) {
            self.load(revision, saved)?;
        }
        Ok([sync.receivers.contains(&me), sync.differed.contains(&me)])
    }
}

impl ElasticState for Trainer {
    type Error = TrainError;

    fn revision(&self) -> u64 {
        self.step as u64
    }

    /// This rank's share of the state.
    fn save(&self) -> Vec<(String, Vec<u8>)> {
        let bytes = |floats: &[f32]| {
            floats.iter().flat_map(|float| float.to_le_bytes()).collect::<Vec<u8>>()
        };
        // A rank with other settings, data or parameters must not take part: its name differs here.
        let (plan, data) = (self.plan.hash(), self.batches.sha256());
        let settings = Settings { dp: 0, ..self.asked_settings() };
        let about = format!("{settings:?}, parameters {plan:016x}, data {data}");
        let counters = self.counters().iter().flat_map(|counter| counter.to_le_bytes()).collect();
        let mut saved = vec![(about, counters)];
        for (name, Place { param, chunk }) in &self.params {
            let weights = self.pipeline.chunks()[*chunk].weights(name).unwrap_or_default();
            saved.push((name.clone(), bytes(&weights)));
            let zeros =
                Moments { first: vec![0.0; param.elements()], second: vec![0.0; param.elements()] };
            let moments = self.adam.moments(name).ok().flatten();
            let Moments { first, second } = moments.as_deref().unwrap_or(&zeros);
            saved.push((format!("first.{name}"), bytes(first)));
            saved.push((format!("second.{name}"), bytes(second)));
        }
        saved
    }

    fn load(&mut self, revision: u64, saved: Vec<(String, Vec<u8>)>) -> Result<(), TrainError> {
        let mut saved = saved.into_iter().map(|(_, bytes)| bytes);
        let floats = |bytes: Vec<u8>| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
        };
        let bytes = saved.next().unwrap_or_default();
        let mut counters = [0; COUNTERS];
        counters
            .iter_mut()
            .zip(bytes.as_chunks().0)
            .for_each(|(counter, chunk)| *counter = u64::from_le_bytes(*chunk));
        self.set_counters(revision, counters);
        let names: Vec<String> = self.params.keys().cloned().collect();
        let mut moments = Vec::new();
        for name in names {
            let mut next = || floats(saved.next().unwrap_or_default());
            self.set_weights(&name, &next())?;
            moments.push((name, Moments { first: next(), second: next() }));
        }
        let [.., updates, _owed, _lost] = counters;
        self.adam.restore(updates as u32, moments);
        Ok(())
    }

    /// Lays the model out over the ranks that are there, and gives all ranks of a share its newest
    /// state.
    fn synchronize(&mut self, world: &Communicator) -> Result<StateSync, TrainError> {
        self.everyone = world.clone();
        let me = world.rank();
        let shares = self.settings.tp * self.settings.pp;
        let (is_open, counters, step) = (self.open.is_some(), self.counters(), self.step as u64);
        let seating = self.seating()?;
        // A rank that has a place has the state of its last step.
        if seating.seat.is_some() {
            seating.held = seating.held.map(|(seat, _)| (seat, step));
        }
        let standing = Standing {
            held: seating.held.map(|(seat, _)| seat),
            revision: seating.held.map_or(0, |(_, revision)| revision),
            is_open: seating.seat.is_some() && is_open,
            counters,
        };
        let all = world.all_gather(standing.words()).wait()?;
        let said: Vec<_> = all.as_chunks().0.iter().map(|words| Standing::of(*words)).collect();

        // The newest state that any rank has is the one that counts. Of the ranks that have it,
        // some may have got further with this after a loss, before another loss interrupted it.
        // They know what is owed since then, and what was lost. (Floats that are not negative sort
        // as their bits do.)
        let newest = said
            .iter()
            .filter(|one| one.held.is_some())
            .max_by_key(|one| (one.revision, one.counters[COUNTERS - 1]));
        let revision = newest.map_or(0, |one| one.revision);
        let held: Vec<_> = said.iter().map(|one| one.held_at(revision)).collect();
        let is_start = revision == 0;
        let seats = seats::assign(shares, &held, is_start).map_err(|missing| match is_start {
            true => TrainError::TooFewRanks { ranks: said.len(), shares },
            false => TrainError::NoReplica { missing, shares, step: revision as usize },
        })?;
        if let Some(newest) = newest {
            self.settle(revision, newest.counters)?;
        }
        self.seating()?.held = held[me].map(|seat| (seat, revision));

        // Both are sums of squares of the same residuals, but resharded ones have been rounded.
        let left = world.all_reduce(vec![self.owed_here()], ReduceOp::Sum).wait()?[0];
        let lost = self.owed - left;
        let lost = if lost > 1e-6 * self.owed { lost.sqrt() } else { 0.0 };
        self.pass_residuals_on(world, &held, &seats)?;

        self.take_place(world, seats)?;
        let seat = self.seating()?.seat;
        let mut got = [false; 2];
        if let Some(seat) = seat {
            if is_start {
                self.even_out()?;
            }
            let has_it = is_start || self.seating()?.held.is_some();
            got = self.share_state(revision, has_it)?;
            self.seating()?.held = Some((seat, revision));
        }
        let flags = vec![u8::from(seat.is_some()), u8::from(got[0]), u8::from(got[1])];
        let all = world.all_gather(flags).wait()?;
        let ranks = |is: fn([u8; 3]) -> bool| {
            let all = all.as_chunks().0.iter().enumerate();
            all.filter(|(_, flags)| is(**flags)).map(|(rank, _)| rank).collect()
        };
        self.owed = world.all_reduce(vec![self.owed_here()], ReduceOp::Sum).wait()?[0];
        // Ranks may have been lost one after the other, without a step in between.
        self.lost = (revision, self.lost_at(revision).hypot(lost));
        Ok(StateSync {
            revision,
            sources: ranks(|flags| flags == [1, 0, 0]),
            receivers: ranks(|flags| flags[1] == 1),
            differed: ranks(|flags| flags[2] == 1),
            misfits: Vec::new(),
        })
    }

    /// All but those that are the last to have their share of the model; all of them if nobody
    /// stays.
    fn dispensable(&self, asking: &[usize]) -> Vec<usize> {
        let Some(Seating { seats, .. }) = &self.seating else { return asking.to_vec() };
        if asking.len() == seats.len() {
            return asking.to_vec();
        }
        let mut left = seats.clone();
        let mut is_dispensable = |rank: &usize| {
            let seat = left[*rank].take();
            let has_share = |other: &Option<Seat>| {
                other.is_some_and(|other| seat.is_some_and(|seat| seat.share == other.share))
            };
            let goes = seat.is_none() || left.iter().any(has_share);
            if !goes {
                left[*rank] = seat;
            }
            goes
        };
        asking.iter().copied().filter(|rank| is_dispensable(rank)).collect()
    }

    /// The residuals of a rank that leaves go to the first rank that stays and has the same share,
    /// which sends them with its next gradient.
    fn hand_over(&mut self, world: &Communicator, leaving: &[usize]) -> Result<(), TrainError> {
        let seats = self.seating()?.seats.clone();
        let stays = |rank: usize| if leaving.contains(&rank) { None } else { seats[rank] };
        let after: Vec<_> = (0..seats.len()).map(stays).collect();
        self.pass_residuals_on(world, &seats, &after)?;
        // Adding the residuals of two ranks changes the norm.
        self.owed = world.all_reduce(vec![self.owed_here()], ReduceOp::Sum).wait()?[0];
        Ok(())
    }
}

#[cfg(test)]
#[path = "../tests/common/mod.rs"]
#[allow(dead_code, reason = "integration tests need more of it")]
mod common;

#[cfg(test)]
mod tests {
    use super::common::TOY;
    use super::*;
    use crate::gpt::Config;

    /// The state that each rank ends with. Those with the share `late` miss the end of a step.
    fn train(settings: &Settings, late: Option<usize>) -> Vec<Vec<(String, Vec<u8>)>> {
        let rank = |comm: Communicator| {
            let text: Vec<u8> = (0..999u32).map(|i| b'a' + (i * i % 23) as u8).collect();
            let mut trainer = Trainer::elastic(&TOY, settings.clone(), &text)?;
            trainer.synchronize(&comm)?;
            for _ in 0..3 {
                trainer.step(false)?;
            }
            match trainer.seating()?.seat.map(|seat| seat.share) == late {
                true => trainer.step_without_end()?,
                false => drop(trainer.step(false)?),
            }
            // No rank is lost, but there is a new group all the same.
            let comm = comm.shrink()?;
            let sync = trainer.synchronize(&comm)?;
            assert_eq!((sync.revision, sync.receivers), (4, Vec::new()), "nobody got anything");
            for _ in 0..3 {
                trainer.step(false)?;
            }
            assert!(trainer.replicas_agree()?);
            comm.barrier().wait()?;
            Ok::<_, TrainError>(ElasticState::save(&trainer))
        };
        std::thread::scope(|scope| {
            let comms = farwire::local(4).unwrap();
            let ranks: Vec<_> =
                comms.into_iter().map(|comm| scope.spawn(move || rank(comm).unwrap())).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// All ranks with one share miss that a step counts, so none could send them that state.
    #[test]
    fn a_step_that_counted_elsewhere_is_ended_from_the_gradients_that_all_have() {
        for (tp, pp, codec) in [(2, 1, "int8"), (1, 2, "int8"), (1, 2, "none")] {
            let settings = Settings {
                model: Config { layers: 4, heads: 2, width: 32, context: 8 },
                tp,
                pp,
                batch: 8,
                codec: codec.parse().unwrap(),
                ..Settings::default()
            };
            let whole = train(&settings, None);
            for late in 0..tp * pp {
                assert!(train(&settings, Some(late)) == whole, "tp {tp}, pp {pp}: share {late}");
            }
        }
    }
}

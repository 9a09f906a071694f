//! A codec chosen by measuring.
//!
//! Whether a codec pays depends on the link, the cores, the number of ranks and the length of the
//! vector. So `auto` computes nothing from these: it makes the same all-reduce dense and through
//! each candidate, at growing lengths, and the times decide.
//!
//! ```text
//!  4 KiB   dense int8 dense int8 …      one round: each way once, then all ranks learn the slowest rank's times
//!  16 KiB  dense int8 dense int8 …      the best of several rounds counts
//!  64 KiB  …                            up to 16 MiB, or until the time is up
//! ```
//!
//! Every decision, also which length is next, follows only from times that all ranks have agreed
//! on, so all ranks measure the same lengths and choose the same.

use std::time::Instant;

use farwire_codec::CodecSpec;
use farwire_proto::ReduceOp;

use crate::comm::Communicator;
use crate::compressed::Compressor;
use crate::error::Error;
use crate::policy::{CodecChoice, CodecPolicy, MARGIN, Step};

/// The codecs that `auto` compares with dense. They lose little, and training goes as without them.
const CANDIDATES: [&str; 2] = ["bf16", "int8"];

/// Elements of the shortest and the longest vectors measured: 4 KiB and 16 MiB. Shorter vectors
/// stay dense; longer ones are treated like the longest.
const SHORTEST: usize = 1 << 10;
const LONGEST: usize = 1 << 22;
/// Factor from one length to the next. One more length is measured, between the last that stays
/// dense and the first that does not.
const GROWTH: usize = 4;

/// Rounds at one length: this many, or for this many seconds. But at least `IN_DOUBT` rounds if the
/// length is the first, if its winner is not that of the length before, or if a codec wins by less
/// than `NARROW`.
const ROUNDS: u32 = 8;
const SECONDS_EACH: f64 = 0.1;
const IN_DOUBT: u32 = 3;
const NARROW: f64 = 1.5;

/// No longer length is begun that would end after this many seconds, plus the time of this many of
/// the fastest dense calls, which matters where ranks are far apart.
const SECONDS: f64 = 1.0;
const CALLS: f64 = 36.0;

impl CodecChoice {
    /// Decides which codec a vector takes, by its length. `auto` measures, for about a second, or
    /// some fifty round trips where these take longer.
    ///
    /// All ranks of the group must call this, while they have nothing else to do. `world` holds all
    /// ranks that must choose alike: the group itself, or a group made of several groups of the
    /// same size, such as the data-parallel groups of a mesh. A group of one rank stays dense, and
    /// so does any other in doubt.
    pub fn settle(&self, group: &Communicator, world: &Communicator) -> Result<CodecPolicy, Error> {
        let candidates = match self {
            Self::Given(codec) => return Ok(codec.clone().into()),
            Self::Auto => {
                CANDIDATES.iter().map(|name| name.parse().expect("these are codecs")).collect()
            }
            Self::WhereFaster(codec) => vec![codec.clone()],
        };
        if group.size() == 1 || candidates.iter().all(CodecSpec::is_none) {
            return Ok(CodecPolicy::default());
        }
        measure(group, world, &candidates)
    }
}

fn measure(
    group: &Communicator,
    world: &Communicator,
    candidates: &[CodecSpec],
) -> Result<CodecPolicy, Error> {
    let begun = Instant::now();
    let ways: Vec<_> =
        [CodecSpec::none()].iter().chain(candidates).cloned().map(Compressor::new).collect();
    let mut survey = Survey::default();
    let mut data = Vec::new();
    while let Some(elements) = survey.next() {
        if data.len() != elements {
            data = gradient(elements, group.rank());
        }
        // Shaped as a matrix, for codecs to which the shape matters.
        let rows = 1 << (elements.ilog2() / 2);
        let mut times = Vec::with_capacity(ways.len() + 1);
        for way in &ways {
            let (way, mine) = (way.shaped(&[rows, elements / rows]), data.clone());
            let start = Instant::now();
            group
                .all_reduce_compressed(&format!("auto.{elements}"), mine, ReduceOp::Mean, &way)
                .wait()?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.push(begun.elapsed().as_secs_f64());
        let agreed = world.all_reduce(times, ReduceOp::Max).wait()?;
        let (elapsed, times) = agreed.split_last().expect("what went in comes out");
        survey.note(elements, times, *elapsed);
    }
    Ok(survey.policy(candidates))
}

/// Numbers around zero, most of them small, that differ from rank to rank: how hard a codec works
/// may depend on the data.
fn gradient(elements: usize, rank: usize) -> Vec<f32> {
    let mut state = rank as u64 + 1;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..elements).map(|_| next() * next()).collect()
}

/// What was measured, what to measure next, and what follows from it.
#[derive(Debug, Default)]
struct Survey {
    /// In the order in which they were measured.
    lengths: Vec<Length>,
    /// Seconds since the start.
    elapsed: f64,
}

/// What was measured at one length.
#[derive(Debug)]
struct Length {
    elements: usize,
    rounds: u32,
    /// Seconds of all rounds together.
    total: f64,
    /// The best time of each way: dense, then the candidates.
    best: Vec<f64>,
}

impl Length {
    /// The time of dense as a multiple of the candidate's.
    fn gain(&self, candidate: usize) -> f64 {
        let (dense, coded) = (self.best[0], self.best[candidate + 1]);
        if coded > 0.0 { dense / coded } else { 0.0 }
    }

    /// Seconds of a round in which each way takes its best time.
    fn round(&self) -> f64 {
        self.best.iter().sum()
    }

    /// The fastest candidate among those that beat dense and for which `may` holds.
    fn winner(&self, may: impl Fn(usize) -> bool) -> Option<usize> {
        let winners = (0..self.best.len() - 1)
            .filter(|candidate| may(*candidate) && self.gain(*candidate) >= MARGIN);
        winners.max_by(|a, b| self.gain(*a).total_cmp(&self.gain(*b)))
    }
}

impl Survey {
    /// Elements of the vector in the next round; `None` when everything is known, or time is up.
    fn next(&self) -> Option<usize> {
        let Some(last) = self.lengths.last() else { return Some(SHORTEST) };
        let before = self.lengths.iter().nth_back(1);
        let winner = last.winner(|_| true);
        let is_news = before.is_none_or(|before| before.winner(|_| true) != winner);
        let in_doubt = is_news || winner.is_some_and(|winner| last.gain(winner) < NARROW);
        if (last.rounds < ROUNDS && last.total < SECONDS_EACH)
            || (in_doubt && last.rounds < IN_DOUBT)
        {
            return Some(last.elements);
        }
        let call = self.lengths.iter().map(|length| length.best[0]).fold(f64::INFINITY, f64::min);
        let end = SECONDS + CALLS * call;
        let longer = last.elements * GROWTH;
        let is_growing = before.is_none_or(|before| before.elements < last.elements);
        // Some of the time does not depend on the length; the rest grows with it.
        let growing = before.map_or(0.0, |before| (last.round() - before.round()).max(0.0));
        let ahead = last.round() + GROWTH as f64 * growing;
        if is_growing && longer <= LONGEST {
            if self.elapsed + ahead <= end {
                return Some(longer);
            } else if last.rounds < 2 {
                return Some(last.elements); // it may have been bad luck
            }
        }
        // Where exactly does it begin to pay?
        let first = self.winners().last()?.0.elements;
        let middle = first / 2;
        let is_wanted = first > SHORTEST && self.elapsed <= end;
        let is_new = self.lengths.iter().all(|length| length.elements != middle);
        (is_wanted && is_new).then_some(middle)
    }

    /// Notes a round: the seconds that each way took on the slowest rank, dense first, and the
    /// seconds since the start.
    fn note(&mut self, elements: usize, times: &[f64], elapsed: f64) {
        self.elapsed = elapsed;
        if self.lengths.last().is_none_or(|last| last.elements != elements) {
            let best = vec![f64::INFINITY; times.len()];
            self.lengths.push(Length { elements, rounds: 0, total: 0.0, best });
        }
        let length = self.lengths.last_mut().expect("there is one now");
        length.rounds += 1;
        length.total += times.iter().sum::<f64>();
        length.best.iter_mut().zip(times).for_each(|(best, time)| *best = best.min(*time));
    }

    /// From the longest length down, while there is one: the fastest candidate that wins at this
    /// length and at every longer one, with its least gain over these lengths.
    fn winners(&self) -> impl Iterator<Item = (&Length, usize, f64)> {
        let mut lengths: Vec<&Length> = self.lengths.iter().collect();
        lengths.sort_unstable_by_key(|length| std::cmp::Reverse(length.elements));
        let candidates = lengths.first().map_or(0, |length| length.best.len() - 1);
        let mut least = vec![f64::INFINITY; candidates];
        lengths.into_iter().map_while(move |length| {
            for (candidate, least) in least.iter_mut().enumerate() {
                *least = least.min(length.gain(candidate));
            }
            let fastest = length.winner(|candidate| least[candidate] >= MARGIN)?;
            Some((length, fastest, least[fastest]))
        })
    }

    fn policy(&self, candidates: &[CodecSpec]) -> CodecPolicy {
        let step = |(length, candidate, gain): (&Length, usize, f64)| Step {
            from: length.elements,
            codec: candidates[candidate].clone(),
            // Cut off as it is when printed.
            gain: (gain * 100.0).floor() / 100.0,
        };
        let mut steps: Vec<Step> = self.winners().map(step).collect();
        steps.reverse();
        steps.dedup_by(|longer, shorter| longer.codec == shorter.codec);
        CodecPolicy::new(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwire_proto::DType;
    use proptest::prelude::*;

    /// A link between two ranks, and what coding costs: seconds and bytes per second.
    #[derive(Clone, Copy)]
    struct Link {
        latency: f64,
        rate: f64,
        coding: f64,
    }

    const MEMORY: Link = Link { latency: 10e-6, rate: 4e9, coding: 1e9 };
    const GIGABIT: Link = Link { latency: 400e-6, rate: 0.12e9, coding: 1e9 };
    const THIN: Link = Link { latency: 1e-3, rate: 1.2e6, coding: 1e9 };
    const FAR: Link = Link { latency: 0.2, rate: 12e6, coding: 1e9 };

    impl Link {
        /// Dense, bf16, int8.
        fn times(&self, elements: usize) -> [f64; 3] {
            let bytes = 4.0 * elements as f64;
            let coded =
                |ratio| 1.2 * self.latency + bytes / self.coding + bytes / self.rate / ratio;
            [self.latency + bytes / self.rate, coded(2.0), coded(4.0)]
        }
    }

    fn candidates() -> Vec<CodecSpec> {
        CANDIDATES.iter().map(|name| name.parse().unwrap()).collect()
    }

    /// Runs a whole survey in which rounds take these times, by length and number of the round.
    fn survey(mut times: impl FnMut(usize, u32) -> [f64; 3]) -> Survey {
        let mut survey = Survey::default();
        let (mut elapsed, mut round) = (0.0, 0);
        while let Some(elements) = survey.next() {
            let times = times(elements, round);
            elapsed += times.iter().sum::<f64>();
            survey.note(elements, &times, elapsed);
            round += 1;
            assert!(round < 200, "{survey:?}");
        }
        survey
    }

    fn chosen(survey: &Survey, elements: usize) -> String {
        survey.policy(&candidates()).codec_for(elements, DType::F32).to_string()
    }

    #[test]
    fn each_link_gets_what_is_fastest_on_it() {
        let memory = survey(|elements, _| MEMORY.times(elements));
        assert!(memory.policy(&candidates()).is_dense());
        assert!(
            memory.lengths.iter().any(|length| length.elements == LONGEST),
            "nothing was left out"
        );

        let gigabit = survey(|elements, _| GIGABIT.times(elements));
        assert_eq!(gigabit.policy(&candidates()).to_string(), "int8 from 64 KiB (1.38×)");
        assert_eq!(chosen(&gigabit, 100 << 20), "int8");

        let far = survey(|elements, _| FAR.times(elements));
        assert_eq!(
            (chosen(&far, 1 << 16), chosen(&far, LONGEST)),
            ("none".to_owned(), "int8".to_owned())
        );
        assert!(far.elapsed < 12.0, "{} s", far.elapsed);
    }

    #[test]
    fn a_thin_link_is_not_measured_for_long_and_still_compressed() {
        let thin = survey(|elements, _| THIN.times(elements));
        assert!(thin.elapsed < 2.0, "{} s", thin.elapsed);
        assert_eq!(
            (chosen(&thin, SHORTEST), chosen(&thin, LONGEST)),
            ("int8".to_owned(), "int8".to_owned())
        );
    }

    proptest! {
        /// Somebody else had the processor for a moment.
        #[test]
        fn one_hiccup_does_not_change_the_choice(at in 0u32..80, way in 0usize..3, link in 0usize..4) {
            let link = [MEMORY, GIGABIT, THIN, FAR][link];
            let undisturbed = survey(|elements, _| link.times(elements)).policy(&candidates());
            let disturbed = survey(|elements, round| {
                let mut times = link.times(elements);
                times[way] += if round == at { 0.5 } else { 0.0 };
                times
            });
            let disturbed = disturbed.policy(&candidates());
            for elements in [SHORTEST, LONGEST] {
                let codec = |policy: &CodecPolicy| policy.codec_for(elements, DType::F32);
                prop_assert_eq!(codec(&disturbed), codec(&undisturbed), "{} and {}", disturbed, undisturbed);
            }
        }

        #[test]
        fn nothing_is_chosen_that_was_not_faster_than_dense(
            noise in proptest::collection::vec(0.2f64..5.0, 600),
            scale in -6f64..0.0,
        ) {
            let mut noise = noise.into_iter().cycle();
            let mut noisy = |time: f64| time * noise.next().unwrap();
            let link = Link { latency: 10f64.powf(scale), rate: 1e9, coding: 2e9 };
            let survey = survey(|elements, _| link.times(elements).map(&mut noisy));
            let policy = survey.policy(&candidates());
            for length in &survey.lengths {
                let codec = policy.codec_for(length.elements, DType::F32);
                if let Some(candidate) = candidates().iter().position(|other| *other == codec) {
                    prop_assert!(length.gain(candidate) >= MARGIN, "{policy}: {length:?}");
                }
            }
            prop_assert!(policy.codec_for(SHORTEST - 1, DType::F32).is_none());
            prop_assert_eq!(&policy.to_string().parse::<CodecPolicy>().unwrap(), &policy);
            let per_length = |length: &Length| length.rounds <= ROUNDS && length.total < 1e9;
            prop_assert!(survey.lengths.iter().all(per_length));
        }
    }
}

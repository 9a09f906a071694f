//! Chaos for membership: processes that are killed, stopped, cut off, leave and join, in virtual
//! time, and a judge that watches what they agree on.
//!
//! A [`Schedule`] is a world and a list of [`Fault`]s with their times. [`Schedule::random`] makes
//! one from a seed; [`Schedule::run`] drives an [`Agreement`] for each process through it, and
//! returns what was seen, or the first [`Violation`]. [`Schedule::shrink`] makes a failing schedule
//! smaller. The same schedule gives the same run.
//!
//! Links behave like the runtime's: reliable and in order until one end gives the other up, which
//! is final. A message may take long, and a process may stop for long; a process that waits too
//! long for another gives it up. When a process ends, the others on its host are told after they
//! have read what it sent, and the rest find out by its silence. (`loss` makes links worse than
//! that: messages vanish.)
//!
//! Checked all the time:
//!
//! - No two processes have different members for one epoch, and every epoch follows a known one.
//! - A process that joins has a link to every member that it joins.
//!
//! And at the end, when the faults are over:
//!
//! - If some member reaches enough others to go on, all members of the newest view are alive, reach
//!   each other, and know that view.
//! - Otherwise those that want to go on have been told that they cannot.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use farwire_proto::membership::{
    Agreement, Event, Member, Message, Outgoing, Proof, Settings, TieRule, View,
};
use farwire_proto::{Epoch, Peer, Time};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Silence after which a peer is given up.
const DETECT: Duration = Duration::from_millis(1800);
/// The longest that a message takes on an intact link.
const LONGEST_DELAY: Duration = Duration::from_millis(40);
/// The most events in one run, far more than any run needs.
const MAX_EVENTS: usize = 400_000;
/// How often a process tries again after it was told that it cannot go on.
const RETRIES: u32 = 4;

/// Something that happens to processes. Numbers choose among the processes alive at the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A process is killed.
    Kill(u32),
    /// A process is killed when it has sent this many more messages.
    KillWithin(u32, u32),
    /// A process is killed, and all hosts are told.
    KillAndTell(u32),
    /// A process says goodbye and ends.
    Leave(u32),
    /// A process stops for a while.
    Stop(u32, Duration),
    /// Processes on the two sides of a mask cannot reach each other for a while.
    Cut(u64, Duration),
    /// Two processes cannot reach each other for a while.
    CutPair(u32, u32, Duration),
    /// A new process asks to join.
    Join,
    /// A new process asks to join, but gets links to only half of the others.
    JoinHalf,
    /// A new process asks to join, and soon dies.
    JoinAndDie,
    /// All members reach a step boundary.
    Boundary,
    /// A process asks for a new view, for no reason that others know.
    Ask(u32),
}

/// A world, and what happens to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Decides all delays.
    pub seed: u64,
    /// Processes at the start.
    pub ranks: u32,
    /// The number of hosts they are spread over.
    pub hosts: u32,
    /// Which half goes on when two halves are cut off from each other.
    pub ties: TieRule,
    /// How many of a thousand messages vanish.
    pub loss: u32,
    /// What happens, in order.
    pub faults: Vec<(Duration, Fault)>,
}

/// Which promise was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// An epoch has one list of members.
    OneView,
    /// A process that joins has a link to every member.
    WholeJoin,
    /// A process that reaches enough others goes on; one that does not is told so.
    Progress,
    /// Every run ends.
    End,
}

/// What the judge objects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// When it happened.
    pub at: Duration,
    /// Which promise was broken.
    pub promise: Promise,
    /// What was wrong.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {:?}: {}", self.at, self.what)
    }
}

/// What happened in a run without objections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Views that were decided.
    pub views: u64,
    /// Processes that were let in.
    pub joined: u64,
    /// Processes that were told that the group went on without them.
    pub evicted: u64,
    /// Times that a process was told that it reaches too few others.
    pub no_quorum: u64,
    /// Messages that were sent.
    pub messages: u64,
    /// Processes that ended.
    pub deaths: u64,
}

impl std::ops::AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        self.views += other.views;
        self.joined += other.joined;
        self.evicted += other.evicted;
        self.no_quorum += other.no_quorum;
        self.messages += other.messages;
        self.deaths += other.deaths;
    }
}

impl Schedule {
    /// The schedule of a seed: mostly small worlds, where faults coincide, and up to 64 ranks.
    pub fn random(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let ranks = match rng.random_range(0..100) {
            0..60 => rng.random_range(1..=5),
            60..88 => rng.random_range(6..=12),
            88..97 => rng.random_range(13..=32),
            _ => rng.random_range(33..=64),
        };
        let hosts = if rng.random_bool(0.4) { 1 } else { rng.random_range(1..=ranks) };
        let ties = if rng.random_bool(0.5) { TieRule::Lowest } else { TieRule::Neither };
        let loss = if rng.random_bool(0.2) { rng.random_range(1..=200) } else { 0 };
        // Many at once, or one after the other.
        let spacing = [5, 50, 500, 3000][rng.random_range(0..4)];
        let mut at = Duration::ZERO;
        let faults = (0..rng.random_range(1..=14))
            .map(|_| {
                at += Duration::from_millis(rng.random_range(0..=spacing));
                (at, Fault::random(&mut rng))
            })
            .collect();
        Self { seed, ranks, hosts, ties, loss, faults }
    }

    /// Runs the schedule. `tamper` is given every member's [`Agreement`] before it starts, for
    /// tests that break it.
    pub fn run(&self, tamper: &dyn Fn(&mut Agreement)) -> Result<Seen, Violation> {
        World::new(self, tamper).run()
    }

    /// If this schedule fails, a schedule that still fails and from which no single fault can be
    /// removed.
    pub fn shrink(&self, fails: &dyn Fn(&Self) -> bool) -> Self {
        let mut smallest = self.clone();
        loop {
            let mut smaller = Vec::new();
            for skip in 0..smallest.faults.len() {
                let mut without = smallest.clone();
                without.faults.remove(skip);
                smaller.push(without);
            }
            if smallest.ranks > 1 {
                smaller.push(Self { ranks: smallest.ranks - 1, ..smallest.clone() });
            }
            if smallest.loss > 0 {
                smaller.push(Self { loss: 0, ..smallest.clone() });
            }
            match smaller.into_iter().find(fails) {
                Some(failing) => smallest = failing,
                None => return smallest,
            }
        }
    }
}

impl Fault {
    fn random(rng: &mut ChaCha8Rng) -> Self {
        let who = rng.random_range(0..64);
        let a_while = Duration::from_millis(match rng.random_range(0..3) {
            0 => rng.random_range(1..200),
            1 => rng.random_range(200..2500),
            _ => rng.random_range(2500..9000),
        });
        match rng.random_range(0..20) {
            0..3 => Self::Kill(who),
            3..6 => Self::KillWithin(who, rng.random_range(0..40)),
            6 => Self::KillAndTell(who),
            7 => Self::Leave(who),
            8..10 => Self::Stop(who, a_while),
            10..12 => Self::Cut(rng.next_u64(), a_while),
            12 => Self::CutPair(who, rng.random_range(0..64), a_while),
            13..15 => Self::Join,
            15 => Self::JoinHalf,
            16 => Self::JoinAndDie,
            17..19 => Self::Boundary,
            _ => Self::Ask(who),
        }
    }
}

/// An event that is due. Processes are named by their index, which is also the number they use
/// themselves.
#[derive(Clone, Debug)]
enum Due {
    Fault(usize),
    Arrives {
        from: usize,
        to: usize,
        message: Box<Message>,
        number: Peer,
    },
    /// The first gives the second up.
    GivesUp(usize, usize),
    /// The first is told that the second has ended.
    Told(usize, usize, Proof),
    Ready(usize, usize),
    Gone(usize, usize),
    Shrink(usize),
    Admit(usize),
    Timer(usize),
    Dies(usize),
}

impl Due {
    /// The process that acts, if it is alive and not stopped.
    fn actor(&self) -> Option<usize> {
        match *self {
            Self::Fault(_) | Self::Dies(_) => None,
            Self::Arrives { to, .. } => Some(to),
            Self::GivesUp(who, _)
            | Self::Told(who, ..)
            | Self::Ready(who, _)
            | Self::Gone(who, _)
            | Self::Shrink(who)
            | Self::Admit(who)
            | Self::Timer(who) => Some(who),
        }
    }
}

struct Process {
    host: u32,
    alive: bool,
    stopped_until: Time,
    /// Set once it is a member.
    agreement: Option<Agreement>,
    /// Messages that arrived before it was a member.
    early: Vec<(Peer, Message)>,
    dies_within: Option<u32>,
    /// Whether it gets links to all others.
    whole: bool,
    retries: u32,
    /// The epoch that it was told it cannot go on from.
    gave_up: Option<Epoch>,
    timer: Option<Time>,
}

struct World<'a> {
    schedule: &'a Schedule,
    tamper: &'a dyn Fn(&mut Agreement),
    rng: ChaCha8Rng,
    now: Time,
    processes: Vec<Process>,
    /// By number; if two get the same number, the first.
    numbers: BTreeMap<Peer, usize>,
    queue: BinaryHeap<Reverse<Entry>>,
    next_entry: u64,
    /// Pairs of which the first has given the second up.
    given_up: HashSet<(usize, usize)>,
    /// Until when the first cannot reach the second.
    cut_until: HashMap<(usize, usize), Time>,
    /// When the last message of a link arrives.
    last: HashMap<(usize, usize), Time>,
    /// When messages of a dead process that have not arrived are lost.
    lost_after: HashMap<(usize, usize), Time>,
    told: HashMap<(usize, usize), Proof>,
    /// Pairs of a member and a process that waits to join, with a link between them.
    linked: HashSet<(usize, usize)>,
    views: BTreeMap<Epoch, View>,
    seen: Seen,
}

struct Entry {
    at: Time,
    number: u64,
    due: Due,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<'a> World<'a> {
    fn new(schedule: &'a Schedule, tamper: &'a dyn Fn(&mut Agreement)) -> Self {
        let mut world = Self {
            schedule,
            tamper,
            rng: ChaCha8Rng::seed_from_u64(schedule.seed ^ 0x9e37_79b9_7f4a_7c15),
            now: Time::ZERO,
            processes: Vec::new(),
            numbers: BTreeMap::new(),
            queue: BinaryHeap::new(),
            next_entry: 0,
            given_up: HashSet::new(),
            cut_until: HashMap::new(),
            last: HashMap::new(),
            lost_after: HashMap::new(),
            told: HashMap::new(),
            linked: HashSet::new(),
            views: BTreeMap::new(),
            seen: Seen::default(),
        };
        let view = View::founding(Epoch(0), schedule.ranks).expect("a world has 1 to 256 ranks");
        for rank in 0..schedule.ranks {
            let who = world.start();
            world.processes[who].agreement = Some(world.member(Peer(rank), view.clone()));
            world.numbers.insert(Peer(rank), who);
        }
        world.views.insert(Epoch(0), view);
        let mut end = Duration::ZERO;
        for (index, (at, _)) in schedule.faults.iter().enumerate() {
            world.push(Time(*at), Due::Fault(index));
            end = end.max(*at);
        }
        world
    }

    fn member(&self, peer: Peer, view: View) -> Agreement {
        let settings = Settings { ties: self.schedule.ties, ..Settings::default() };
        let mut agreement = Agreement::new(peer, view, settings);
        (self.tamper)(&mut agreement);
        agreement
    }

    fn start(&mut self) -> usize {
        let who = self.processes.len();
        let host = if who < self.schedule.ranks as usize {
            who as u32 % self.schedule.hosts
        } else {
            self.rng.random_range(0..self.schedule.hosts)
        };
        self.processes.push(Process {
            host,
            alive: true,
            stopped_until: Time::ZERO,
            agreement: None,
            early: Vec::new(),
            dies_within: None,
            whole: true,
            retries: 0,
            gave_up: None,
            timer: None,
        });
        who
    }

    fn push(&mut self, at: Time, due: Due) {
        let number = self.next_entry;
        self.next_entry += 1;
        self.queue.push(Reverse(Entry { at: at.max(self.now), number, due }));
    }

    fn soon(&mut self, within: Duration) -> Time {
        let micros = self.rng.random_range(0..=within.as_micros() as u64);
        self.now + Duration::from_micros(micros)
    }

    fn run(mut self) -> Result<Seen, Violation> {
        self.drain()?;
        // The faults are over. Processes that want to go on try a few more times.
        for _ in 0..3 {
            self.now = self.now + Duration::from_secs(30);
            for who in 0..self.processes.len() {
                self.processes[who].retries = 0;
                let at = self.soon(Duration::from_millis(500));
                self.push(at, Due::Shrink(who));
            }
            self.drain()?;
        }
        self.judge_end()?;
        self.seen.views = self.views.len() as u64 - 1;
        Ok(self.seen)
    }

    fn drain(&mut self) -> Result<(), Violation> {
        for _ in 0..MAX_EVENTS {
            let Some(Reverse(Entry { at, due, .. })) = self.queue.pop() else { return Ok(()) };
            self.now = self.now.max(at);
            if let Some(actor) = due.actor() {
                let process = &self.processes[actor];
                if !process.alive {
                    continue;
                }
                if process.stopped_until > self.now {
                    let at = process.stopped_until;
                    self.push(at, due);
                    continue;
                }
            }
            self.happen(due)?;
        }
        Err(self.violation(Promise::End, "the run does not end".to_owned()))
    }

    fn violation(&self, promise: Promise, what: String) -> Violation {
        Violation { at: self.now.0, promise, what }
    }

    fn happen(&mut self, due: Due) -> Result<(), Violation> {
        let now = self.now;
        match due {
            Due::Fault(index) => self.fault(self.schedule.faults[index].1),
            Due::Dies(who) => self.end(who, false, false),
            Due::Arrives { from, to, message, number } => {
                let late = self.lost_after.get(&(from, to)).is_some_and(|limit| now > *limit);
                if late || self.given_up.contains(&(to, from)) {
                    return Ok(());
                }
                let process = &mut self.processes[to];
                match &mut process.agreement {
                    Some(agreement) => agreement.handle_message(now, number, *message),
                    None => self.arrives_early(to, number, *message),
                }
                return self.settle(to);
            }
            Due::GivesUp(who, other) => {
                if !self.given_up.insert((who, other)) {
                    return Ok(());
                }
                if !self.given_up.contains(&(other, who)) {
                    let at = self.soon(DETECT);
                    self.push(at, Due::GivesUp(other, who));
                }
                let number = self.number_of(other);
                if let Some(agreement) = &mut self.processes[who].agreement {
                    agreement.handle_gone(other as u64);
                    number.into_iter().for_each(|number| agreement.handle_lost(now, number));
                }
                self.linked.remove(&(who, other));
                self.want_shrink(who);
                return self.settle(who);
            }
            Due::Told(who, other, proof) => {
                // A proof is complete only if neither has given the other up.
                let whole = !self.given_up.contains(&(who, other))
                    && !self.given_up.contains(&(other, who))
                    && self.schedule.loss == 0;
                let proof = if whole { proof } else { Proof::Ended };
                let number = self.number_of(other);
                if let (Some(agreement), Some(number)) =
                    (&mut self.processes[who].agreement, number)
                {
                    self.told.insert((who, other), proof);
                    agreement.handle_dead(now, number, proof);
                }
                self.want_shrink(who);
                return self.settle(who);
            }
            Due::Ready(who, joiner) => {
                if self.processes[joiner].alive
                    && !self.given_up.contains(&(who, joiner))
                    && let Some(agreement) = &mut self.processes[who].agreement
                    && self.views.values().all(|view| view.find(joiner as u64).is_none())
                {
                    agreement.handle_ready(joiner as u64);
                    self.linked.insert((who, joiner));
                }
            }
            Due::Gone(who, joiner) => {
                if let Some(agreement) = &mut self.processes[who].agreement {
                    agreement.handle_gone(joiner as u64);
                }
            }
            Due::Shrink(who) => {
                if let Some(agreement) = &mut self.processes[who].agreement
                    && agreement.lost().next().is_some()
                {
                    agreement.shrink(now);
                    return self.settle(who);
                }
            }
            Due::Admit(who) => {
                if let Some(agreement) = &mut self.processes[who].agreement {
                    agreement.admit(now);
                    return self.settle(who);
                }
            }
            Due::Timer(who) => {
                self.processes[who].timer = None;
                if let Some(agreement) = &mut self.processes[who].agreement {
                    agreement.handle_timeout(now);
                    return self.settle(who);
                }
            }
        }
        Ok(())
    }

    /// A message reaches a joiner: it says that the joiner is a member, or is kept until it is one.
    fn arrives_early(&mut self, to: usize, from: Peer, message: Message) {
        let view = message.decided().cloned();
        let view = view.and_then(|view| Some((view.find(to as u64)?, view)));
        self.processes[to].early.push((from, message));
        let Some((Member { peer, .. }, view)) = view else { return };
        // Its first view takes the same path as later ones.
        let mut agreement = self.member(peer, view.clone());
        let now = self.now;
        for (from, message) in std::mem::take(&mut self.processes[to].early) {
            agreement.handle_message(now, from, message);
        }
        self.processes[to].agreement = Some(agreement);
        self.numbers.entry(peer).or_insert(to);
        self.watch_members(to, &view);
        self.want_shrink(to);
    }

    fn number_of(&self, who: usize) -> Option<Peer> {
        self.numbers.iter().find(|(_, process)| **process == who).map(|(number, _)| *number)
    }

    fn pick(&self, choice: u32) -> Option<usize> {
        let alive: Vec<_> =
            (0..self.processes.len()).filter(|who| self.processes[*who].alive).collect();
        (!alive.is_empty()).then(|| alive[choice as usize % alive.len()])
    }

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill(who) | Fault::KillAndTell(who) | Fault::Leave(who) => {
                if let Some(who) = self.pick(who) {
                    let tell = matches!(fault, Fault::KillAndTell(_));
                    self.end(who, tell, matches!(fault, Fault::Leave(_)));
                }
            }
            Fault::KillWithin(who, messages) => {
                if let Some(who) = self.pick(who) {
                    self.processes[who].dies_within = Some(messages);
                    // In case it has nothing to send.
                    let at = self.now + Duration::from_secs(5);
                    self.push(at, Due::Dies(who));
                }
            }
            Fault::Stop(who, length) => {
                let Some(who) = self.pick(who) else { return };
                let until = self.now + length;
                self.processes[who].stopped_until = until;
                if length > DETECT {
                    for other in 0..self.processes.len() {
                        if other != who && self.rng.random_bool(0.9) {
                            let at = self.soon(DETECT / 4) + DETECT;
                            self.push(at, Due::GivesUp(other, who));
                        }
                    }
                }
            }
            Fault::Cut(mask, length) => {
                let side = |who: usize| mask >> (who % 64) & 1;
                for one in 0..self.processes.len() {
                    for other in 0..one {
                        if side(one) != side(other) {
                            self.cut(one, other, length);
                        }
                    }
                }
            }
            Fault::CutPair(one, other, length) => {
                if let (Some(one), Some(other)) = (self.pick(one), self.pick(other))
                    && one != other
                {
                    self.cut(one, other, length);
                }
            }
            Fault::Join | Fault::JoinHalf | Fault::JoinAndDie => {
                let joiner = self.start();
                self.processes[joiner].whole = fault != Fault::JoinHalf;
                for who in 0..joiner {
                    self.link_joiner(who, joiner);
                }
                if fault == Fault::JoinAndDie {
                    let at = self.soon(Duration::from_millis(300));
                    self.push(at, Due::Dies(joiner));
                }
            }
            Fault::Boundary => {
                for who in 0..self.processes.len() {
                    let at = self.soon(Duration::from_millis(20));
                    self.push(at, Due::Admit(who));
                }
            }
            Fault::Ask(who) => {
                let now = self.now;
                if let Some(who) = self.pick(who)
                    && let Some(agreement) = &mut self.processes[who].agreement
                {
                    agreement.shrink(now);
                    self.push(now, Due::Timer(who));
                }
            }
        }
    }

    /// A member and a joiner set up a link, unless the joiner never gets that far.
    fn link_joiner(&mut self, who: usize, joiner: usize) {
        let gets_there = self.processes[joiner].whole || who % 2 == 1;
        if self.processes[who].agreement.is_some() && gets_there {
            let at = self.soon(Duration::from_millis(100));
            self.push(at, Due::Ready(who, joiner));
        }
    }

    fn cut(&mut self, one: usize, other: usize, length: Duration) {
        let until = self.now + length;
        for (from, to) in [(one, other), (other, one)] {
            let cut = self.cut_until.entry((from, to)).or_default();
            *cut = (*cut).max(until);
            if length > DETECT && self.rng.random_bool(0.8) {
                let at = self.soon(DETECT / 4) + DETECT;
                self.push(at, Due::GivesUp(from, to));
            }
        }
    }

    /// A process ends. The others on its host are told once they have read all that it sent; if it
    /// said goodbye, so are all that it can reach.
    fn end(&mut self, who: usize, tell_all: bool, goodbye: bool) {
        if !std::mem::replace(&mut self.processes[who].alive, false) {
            return;
        }
        self.seen.deaths += 1;
        for other in 0..self.processes.len() {
            if other == who || !self.processes[other].alive {
                continue;
            }
            let cut = self.cut_until.get(&(who, other)).is_some_and(|until| *until > self.now);
            let same_host = self.processes[who].host == self.processes[other].host;
            let last = self.last.get(&(who, other)).copied().unwrap_or_default().max(self.now);
            let jitter = Duration::from_micros(self.rng.random_range(1..30_000));
            if same_host || (goodbye && !cut) {
                self.push(last + jitter, Due::Told(other, who, Proof::Complete));
            } else {
                // Some messages under way are lost.
                let limit = self.soon(LONGEST_DELAY);
                self.lost_after.insert((who, other), limit);
                if tell_all {
                    let at = self.soon(DETECT);
                    self.push(at, Due::Told(other, who, Proof::Ended));
                }
                let at = self.soon(DETECT / 4) + DETECT;
                self.push(at, Due::GivesUp(other, who));
            }
            let at = self.soon(DETECT);
            self.push(at, Due::Gone(other, who));
        }
    }

    /// Asks for a new view, a little later, if the process has lost a member.
    fn want_shrink(&mut self, who: usize) {
        let lost = self.processes[who].agreement.as_ref();
        if lost.is_some_and(|agreement| agreement.lost().next().is_some()) {
            let at = self.soon(Duration::from_millis(30));
            self.push(at, Due::Shrink(who));
        }
    }

    /// Does what a process's part in the agreement asks for.
    fn settle(&mut self, who: usize) -> Result<(), Violation> {
        loop {
            let Some(agreement) = &mut self.processes[who].agreement else { return Ok(()) };
            if let Some(outgoing) = agreement.poll_transmit() {
                if self.processes[who].dies_within == Some(0) {
                    self.end(who, false, false);
                    return Ok(());
                }
                if let Some(left) = &mut self.processes[who].dies_within {
                    *left -= 1;
                }
                self.send(who, outgoing);
            } else if let Some(event) = agreement.poll_event() {
                self.judge_event(who, event)?;
            } else {
                break;
            }
        }
        let due = self.processes[who].agreement.as_ref().and_then(Agreement::poll_timeout);
        if let Some(due) = due
            && self.processes[who].timer.is_none_or(|timer| timer > due)
        {
            self.processes[who].timer = Some(due);
            self.push(due, Due::Timer(who));
        }
        Ok(())
    }

    fn send(&mut self, from: usize, Outgoing { to, message }: Outgoing) {
        let named = usize::try_from(to.process).ok().filter(|who| *who != 0 || to.peer == Peer(0));
        let Some(to) = named.or_else(|| self.numbers.get(&to.peer).copied()) else { return };
        let Some(number) = self.processes[from].agreement.as_ref().and(self.number_of(from)) else {
            return;
        };
        self.seen.messages += 1;
        // A process that was just let in cannot know that it should ask again.
        let member = self.processes.get(to).is_some_and(|process| process.agreement.is_some());
        let lost = member && self.rng.random_range(0..1000) < self.schedule.loss;
        if lost || self.given_up.contains(&(from, to)) || to >= self.processes.len() {
            return;
        }
        let begins = self.cut_until.get(&(from, to)).copied().unwrap_or_default().max(self.now);
        // Mostly short, sometimes long.
        let longest = if self.rng.random_bool(0.9) { LONGEST_DELAY / 20 } else { LONGEST_DELAY };
        let delay = Duration::from_micros(self.rng.random_range(20..longest.as_micros() as u64));
        let last = self.last.entry((from, to)).or_default();
        *last = (*last).max(begins + delay);
        let at = *last;
        self.push(at, Due::Arrives { from, to, message: Box::new(message), number });
    }

    /// The link to a new member is watched like any other, and may be lost already.
    fn watch_members(&mut self, who: usize, view: &View) {
        let now = self.now;
        for member in view.members() {
            let other = member.process as usize;
            if self.given_up.contains(&(who, other))
                && let Some(agreement) = &mut self.processes[who].agreement
            {
                agreement.handle_lost(now, member.peer);
            } else if other != who
                && !self.processes[other].alive
                && !self.told.contains_key(&(who, other))
            {
                let at = self.soon(DETECT);
                if self.processes[who].host == self.processes[other].host {
                    self.push(at, Due::Told(who, other, Proof::Ended));
                } else {
                    self.push(at, Due::GivesUp(who, other));
                }
            }
        }
    }

    fn judge_event(&mut self, who: usize, event: Event) -> Result<(), Violation> {
        match event {
            Event::Changed(view) => {
                self.judge_view(who, &view)?;
                for member in view.members() {
                    self.numbers.entry(member.peer).or_insert(member.process as usize);
                }
                self.watch_members(who, &view);
                let process = &mut self.processes[who];
                (process.retries, process.gave_up) = (0, None);
                // Processes that still wait to join set up links to the new member.
                let newcomers: Vec<_> = (self.schedule.ranks as usize..self.processes.len())
                    .filter(|joiner| self.processes[*joiner].agreement.is_none())
                    .filter(|joiner| !self.linked.contains(&(who, *joiner)))
                    .collect();
                for joiner in newcomers {
                    self.link_joiner(who, joiner);
                }
                self.want_shrink(who);
                Ok(())
            }
            Event::Evicted(view) => {
                self.seen.evicted += 1;
                self.judge_view(who, &view)
            }
            Event::NoQuorum { .. } => {
                self.seen.no_quorum += 1;
                let process = &mut self.processes[who];
                process.gave_up = process.agreement.as_ref().map(|part| part.view().epoch());
                process.retries += 1;
                if process.retries <= RETRIES {
                    let at = self.soon(DETECT) + DETECT;
                    self.push(at, Due::Shrink(who));
                }
                Ok(())
            }
        }
    }

    fn judge_view(&mut self, who: usize, view: &View) -> Result<(), Violation> {
        let epoch = view.epoch();
        if let Some(known) = self.views.get(&epoch) {
            if known != view {
                let what = format!(
                    "two views of epoch {}: process {who} has {:?}, another had {:?}",
                    epoch.0,
                    view.peers().collect::<Vec<_>>(),
                    known.peers().collect::<Vec<_>>()
                );
                return Err(self.violation(Promise::OneView, what));
            }
            return Ok(());
        }
        let Some(before) = self.views.get(&Epoch(epoch.0.wrapping_sub(1))) else {
            let what = format!("epoch {} follows none", epoch.0);
            return Err(self.violation(Promise::OneView, what));
        };
        let joined: Vec<_> =
            view.members().iter().filter(|member| !before.contains(member.peer)).collect();
        for joiner in &joined {
            for member in view.members().iter().filter(|member| before.contains(member.peer)) {
                let pair = (member.process as usize, joiner.process as usize);
                // A link that was lost since then is not their fault.
                if !self.linked.contains(&pair) && !self.given_up.contains(&pair) {
                    let what = format!(
                        "process {} was let in, and process {} has no link to it",
                        joiner.process, member.process
                    );
                    return Err(self.violation(Promise::WholeJoin, what));
                }
            }
        }
        self.seen.joined += joined.len() as u64;
        self.views.insert(epoch, view.clone());
        Ok(())
    }

    fn judge_end(&self) -> Result<(), Violation> {
        let part = |who: usize| self.processes[who].agreement.as_ref();
        let lives = |who: usize| self.processes[who].alive;
        let reaches = |one: usize, other: usize| {
            one == other
                || (lives(one)
                    && lives(other)
                    && !self.given_up.contains(&(one, other))
                    && !self.given_up.contains(&(other, one)))
        };
        let in_play = (0..self.processes.len())
            .filter(|who| lives(*who) && part(*who).is_some_and(|part| !part.is_evicted()));
        let views = in_play.clone().filter_map(|who| part(who).map(Agreement::view));
        let Some(newest) = views.max_by_key(|view| view.epoch()) else { return Ok(()) };
        let members: Vec<_> =
            newest.members().iter().map(|member| member.process as usize).collect();
        let knows =
            |who: usize| part(who).is_some_and(|part| part.view().epoch() == newest.epoch());
        let whole = members.iter().all(|one| members.iter().all(|other| reaches(*one, *other)))
            && members.iter().all(|who| lives(*who));
        let in_play: Vec<_> = in_play.collect();
        let all = members.iter().copied();
        for one in all.filter(|who| in_play.contains(who) && knows(*who)) {
            let reached: Vec<_> =
                members.iter().copied().filter(|other| reaches(one, *other)).collect();
            let behind = reached.iter().copied().find(|other| lives(*other) && !knows(*other));
            let told = |other: &usize| self.told.get(&(one, *other)).copied();
            let enough = {
                let (twice, all) = (2 * reached.len(), members.len());
                let tie = self.schedule.ties == TieRule::Lowest && reached.contains(&members[0]);
                let alive = members.iter().all(|it| reached.contains(it) || told(it).is_some());
                let unknown: Vec<_> = members
                    .iter()
                    .filter(|it| !reached.contains(it) && told(it) != Some(Proof::Complete))
                    .collect();
                let safe =
                    self.schedule.ties == TieRule::Neither || !unknown.contains(&&members[0]);
                let may = 2 * unknown.len() < all || (2 * unknown.len() == all && safe);
                (twice > all || (twice == all && tie) || alive) && may
            };
            // This holds even where messages vanish: a member that missed the last one has to ask.
            if enough && let Some(behind) = behind {
                let what = format!("process {one} went on, process {behind} was left behind");
                return Err(self.violation(Promise::Progress, what));
            }
            if enough && !whole {
                let what = format!(
                    "process {one} reaches {reached:?} of {members:?}, and does not go on from \
                     epoch {}",
                    newest.epoch().0
                );
                return Err(self.violation(Promise::Progress, what));
            }
            let lost = part(one).is_some_and(|part| part.lost().next().is_some());
            if lost && !enough && self.processes[one].gave_up != Some(newest.epoch()) {
                let what = format!(
                    "process {one} reaches only {reached:?} of {members:?}, and was not told that \
                     it cannot go on"
                );
                return Err(self.violation(Promise::Progress, what));
            }
        }
        Ok(())
    }
}

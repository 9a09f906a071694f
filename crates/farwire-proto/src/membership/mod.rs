//! Membership: how a group agrees on who is in it, when ranks die, are cut off, or join.
//!
//! A group is a chain of [`View`]s. Each is a list of members with the next *epoch* number, and the
//! members of one view choose the next. Every member runs an [`Agreement`]; none of them is
//! indispensable. The choice of one view is one instance of single-decree Paxos among the members
//! of the view before it:
//!
//! ```text
//!   asked to change ──▶ I lead ──Prepare──▶ all ──Promise──▶ enough? ──Accept──▶ all
//!         │ lowest leads                                        │ no: NoQuorum     │
//!         └─Nudge──▶ the lowest that lives                      ▼                  │ Accepted, to all,
//!                    (or lead, when it is silent)        what was accepted,        │ to the leader last
//!                                                        or who has answered ◀─────┤
//!                    next view ◀──Decided── leader ◀── enough accepted ◀───────────┘
//! ```
//!
//! 1. A member that wants a change (its caller lost a rank, or lets somebody in) asks the lowest
//!    member that lives to lead, or leads if it is the lowest. If the leader is silent, the next
//!    one leads, with a higher [`Ballot`]. A leader's death only starts another round.
//! 2. The leader asks all. An answer promises to accept nothing older, and says what the member has
//!    accepted, who it knows to be dead, whom it cannot reach, and who is waiting to join with a
//!    link to it. The leader waits for all members that it does not know to be dead or out of
//!    reach.
//! 3. If somebody has accepted a proposal, the leader proposes the newest such proposal again.
//!    Otherwise it proposes the members that answered and can reach each other, and one joiner that
//!    *all of them* have a link to, if all are at a step boundary. So a join is on all members or
//!    on none.
//! 4. When enough have accepted, it is decided, and the leader tells everyone.
//!
//! # What is enough
//!
//! Let there be n members. A death is *proven* if the process is known to have ended: the host said
//! so, or it said goodbye. The proof is *complete* if, besides, everything that it ever sent to the
//! member that has the proof has been read. A loss of contact proves nothing, and is a suspicion.
//!
//! - **To decide**, acceptances of more than n/2 members are enough. So are those of all members
//!   that are not proven dead. With [`TieRule::Lowest`] so are those of exactly n/2, if the lowest
//!   member is among them.
//! - **To propose**, let X be the members that have neither promised nor died with a complete
//!   proof. X must not be able to have decided anything: it has fewer than n/2 members, or exactly
//!   n/2 and ([`TieRule::Lowest`]) not the lowest one.
//!
//! # Why there are never two views with one number
//!
//! Claim: if a view was decided with ballot b, then every proposal with a higher ballot is the same
//! view. Let Q be those whose acceptances decided it, and let a leader with a higher ballot be
//! about to propose. Some member of Q is not in X:
//!
//! - If Q is more than n/2, or n/2 with the lowest: X is too small to contain it, by the rule for
//!   proposing.
//! - If Q is all but the proven dead: the leader lives and has promised to itself. Proofs are true
//!   and final (a number is never used for a second process), so it was not proven dead then
//!   either: it is in Q, and not in X.
//!
//! So a member m of Q has promised, or has died with a complete proof. If it promised: it accepted
//! before it promised, for it refuses what is older than its promise; so it reported the
//! acceptance. (Nothing newer than the leader's ballot is ever reported: a member that hears that a
//! ballot was accepted promises nothing older.) If it died: it had handed the news of its
//! acceptance to every link before it told the leader of ballot b, which counted it only then. (A
//! leader counts itself after its `Accept` was handed to every link.) The proof is complete, so the
//! news was read by the member that has the proof, which is the new leader or reported it in its
//! promise. Either way the new leader knows of a proposal accepted with a ballot of at least b, and
//! proposes the newest that it knows of, which by induction over ballots is the same view. ∎
//!
//! Removing the proven dead from the rule *to decide* is safe since a group that goes on without
//! them cannot find them on the other side of a partition. Removing them from the rule *to propose*
//! is not: before they died, they may have gone on without us. A complete proof tells that they did
//! not. So one of two, or two of five, go on when the others are killed on the same host; where the
//! proof is not complete, they go on only if the dead could not have been enough on their own.
//!
//! Three rules for the driver follow, and the last two are easy to miss:
//!
//! - Messages are handed to links in the order of [`poll_transmit`](Agreement::poll_transmit), even
//!   if they go to different links. [`poll_event`](Agreement::poll_event) returns nothing until all
//!   of them are.
//! - A proof is complete only if the link was whole until the end. A process that gives a peer up,
//!   or drops a message to it, must make sure that the peer never takes this process's death as
//!   completely proven.
//! - A process that has said goodbye neither answers nor leads any more, though it may yet live a
//!   while. What others say to it then is an answer to its goodbye, and proves nothing about them.
//!
//! # What was left open
//!
//! A member that is cut off cannot know what the others decide. It gets [`Event::NoQuorum`] if
//! those it reaches are not enough, and [`Event::Evicted`] if it hears that the group went on
//! without it. Messages of an older instance are ignored, except that questions are answered with
//! the newest view: the fence.

mod message;
mod view;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub(crate) use message::MIN_MESSAGE;
pub use message::{MAX_MESSAGE, Message, MessageError};
pub use view::{MAX_MEMBERS, Member, View};

use crate::ids::{Epoch, Peer, Time};

/// The most waiting processes that a promise names.
pub const MAX_READY: usize = 16;

/// A member that has no wish of its own asks at least this often what came of a round, before it
/// stops asking.
const MAX_QUESTIONS: usize = 12;

/// The number of a leader's attempt. Ballots are ordered by round, then by leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ballot {
    /// Counts from 1 in every epoch.
    pub round: u32,
    /// Whose it is.
    pub leader: Peer,
}

impl Ballot {
    const NONE: Self = Self { round: 0, leader: Peer(0) };
}

/// Which half goes on when a group is cut into two of equal size. The same on all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TieRule {
    /// The half with the lowest rank.
    #[default]
    Lowest,
    /// Neither. Then half of a group may go on when the other half is proven dead, even if the
    /// proofs are not complete.
    Neither,
}

/// How a death is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proof {
    /// The process has ended; what it sent last may be lost.
    Ended,
    /// It has ended, and everything that it ever sent to this process has been read.
    Complete,
}

/// What a member is told at the start.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The same on all members.
    pub ties: TieRule,
    /// How long to wait before saying something again, or leading instead of a silent leader: a few
    /// round trips.
    pub retry: Duration,
    /// How long a member that is neither dead nor out of reach may take to answer.
    pub patience: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            ties: TieRule::default(),
            retry: Duration::from_millis(50),
            patience: Duration::from_secs(10),
        }
    }
}

/// What came of the attempts to change the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// This is the view from now on.
    Changed(View),
    /// The group went on without this process, as this view.
    Evicted(View),
    /// Those that this member can reach are not enough to go on; the view stays as it was.
    NoQuorum {
        /// Who has answered, this member included.
        reached: Vec<Peer>,
        /// Who has not, and is not proven dead.
        missing: Vec<Peer>,
    },
}

/// A message to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// The receiver.
    pub to: Member,
    /// The message.
    pub message: Message,
}

/// Ways to break the protocol, for tests that must notice.
#[cfg(feature = "flaws")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Messages of an older instance count in this one.
    SkipFence,
    /// Any half is enough, on both sides.
    ForgetTieRule,
    /// A joiner is let in if only one member has a link to it.
    AdmitOnSubset,
    /// A leader uses the number again for its own list, whatever was accepted.
    ReuseEpoch,
    /// What was promised is decided, without the second round.
    DropSecondRound,
    /// The dead need not have been heard to the end, however their death is known.
    TrustAnyProof,
    /// A member tells the leader that it has accepted before it tells the others.
    TellLeaderFirst,
}

/// What this member's caller wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    Shrink,
    Admit,
}

/// What a member knows, as it answers a leader.
#[derive(Clone, Debug)]
struct Answer {
    accepted: Option<(Ballot, View)>,
    complete: BTreeSet<Peer>,
    suspects: BTreeSet<Peer>,
    ready: BTreeSet<u64>,
}

/// A round that this member leads.
#[derive(Debug)]
struct Attempt {
    ballot: Ballot,
    began: Time,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    Gathering { admitting: bool, answers: BTreeMap<Peer, Answer> },
    Proposing { view: View, accepted: BTreeSet<Peer> },
}

/// One member's part in agreeing on the next view. It does no IO and reads no clock.
///
/// - **Wishes**: [`shrink`](Self::shrink), [`admit`](Self::admit).
/// - **What happened**: [`handle_message`](Self::handle_message),
///   [`handle_lost`](Self::handle_lost), [`handle_dead`](Self::handle_dead),
///   [`handle_ready`](Self::handle_ready), [`handle_gone`](Self::handle_gone),
///   [`handle_timeout`](Self::handle_timeout).
/// - **What to do**: after any of these, [`poll_transmit`](Self::poll_transmit) until it is `None`,
///   then [`poll_event`](Self::poll_event); then wait no longer than
///   [`poll_timeout`](Self::poll_timeout).
#[derive(Debug)]
pub struct Agreement {
    me: Peer,
    view: View,
    settings: Settings,
    /// The view in which the group went on without this process.
    evicted: Option<View>,
    wants: Option<Want>,
    /// When it began to want that.
    asked: Time,
    /// As a voter on the next view: the newest ballot promised.
    promised: Ballot,
    accepted: Option<(Ballot, View)>,
    /// A leader that is answered once this member is at a step boundary.
    deferred: Option<Ballot>,
    attempt: Option<Attempt>,
    /// The highest round that this member has heard of.
    round: u32,
    /// Attempts and waits that came to nothing.
    tries: u32,
    /// How often it was asked what came of a round.
    questions: u32,
    /// What each other member was last heard to accept.
    heard: BTreeMap<Peer, (Ballot, View)>,
    /// Kept for ever.
    dead: BTreeMap<Peer, Proof>,
    suspects: BTreeSet<Peer>,
    /// Those that wait to join and have a link to this member.
    ready: BTreeSet<u64>,
    timer: Option<Time>,
    transmits: VecDeque<Outgoing>,
    events: VecDeque<Event>,
    #[cfg(feature = "flaws")]
    flaw: Option<Flaw>,
}

/// Whether the machine has a flaw. Without the feature, it has none.
macro_rules! flawed {
    ($self:ident, $flaw:ident) => {{
        #[cfg(feature = "flaws")]
        let flawed = $self.flaw == Some(Flaw::$flaw);
        #[cfg(not(feature = "flaws"))]
        let flawed = false;
        flawed
    }};
}

impl Agreement {
    /// The part of member `me` in a view.
    ///
    /// # Panics
    ///
    /// If `me` is not a member.
    pub fn new(me: Peer, view: View, settings: Settings) -> Self {
        assert!(view.contains(me), "who agrees is a member");
        Self {
            me,
            view,
            settings,
            evicted: None,
            wants: None,
            asked: Time::ZERO,
            promised: Ballot::NONE,
            accepted: None,
            deferred: None,
            attempt: None,
            round: 0,
            tries: 0,
            questions: 0,
            heard: BTreeMap::new(),
            dead: BTreeMap::new(),
            suspects: BTreeSet::new(),
            ready: BTreeSet::new(),
            timer: None,
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            #[cfg(feature = "flaws")]
            flaw: None,
        }
    }

    /// Breaks the protocol.
    #[cfg(feature = "flaws")]
    pub fn set_flaw(&mut self, flaw: Flaw) {
        self.flaw = Some(flaw);
    }

    /// The newest view that this member knows of and is in.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Whether the group went on without this process.
    pub fn is_evicted(&self) -> bool {
        self.evicted.is_some()
    }

    /// Members that this one cannot reach, or knows to be dead.
    pub fn lost(&self) -> impl Iterator<Item = Peer> + '_ {
        self.view.peers().filter(|peer| self.is_lost(*peer))
    }

    /// Asks for the next view, of all members that can be reached. An event will say what came of
    /// it.
    pub fn shrink(&mut self, now: Time) {
        self.ask(now, Want::Shrink);
    }

    /// Says that this member is at a step boundary, and asks for a view with a process that waits
    /// to join. All members must ask. If somebody is lost meanwhile, the next view is without them,
    /// and perhaps without the joiner.
    pub fn admit(&mut self, now: Time) {
        self.ask(now, Want::Admit);
    }

    fn ask(&mut self, now: Time, want: Want) {
        if self.is_evicted() {
            return;
        }
        if self.wants.replace(want).is_none() {
            (self.asked, self.tries) = (now, 0);
        }
        if let Some(ballot) = self.deferred.take().filter(|ballot| *ballot == self.promised) {
            self.promise(ballot);
            self.timer = Some(now + self.backoff());
            return;
        }
        if self.attempt.is_some() || self.is_led() {
            self.timer.get_or_insert(now + self.backoff());
            return;
        }
        self.call_for_leader(now);
    }

    /// Whether this member's promise is to another member that lives.
    fn is_led(&self) -> bool {
        let leader = self.promised.leader;
        self.promised != Ballot::NONE && leader != self.me && !self.is_lost(leader)
    }

    /// Leads, if this is the lowest member that lives; otherwise asks the lowest to.
    fn call_for_leader(&mut self, now: Time) {
        let lowest = self.view.members().iter().copied().find(|member| !self.is_lost(member.peer));
        match lowest {
            Some(lowest) if lowest.peer != self.me => {
                let (epoch, admitting) = (self.instance(), self.wants == Some(Want::Admit));
                self.send(lowest, Message::Nudge { epoch, admitting });
                self.timer = Some(now + self.backoff());
            }
            _ => self.lead(now),
        }
    }

    /// A message from another member has arrived.
    pub fn handle_message(&mut self, now: Time, from: Peer, message: Message) {
        if from == self.me {
            return;
        }
        if let Some(view) = &self.evicted {
            // Others that were left behind may not have heard.
            let asks = matches!(
                message,
                Message::Nudge { .. } | Message::Prepare { .. } | Message::Accept { .. }
            );
            if asks {
                let view = view.clone();
                self.send_to(from, Message::Decided { view });
            }
            return;
        }
        // Remembered whichever view it is about: if the sender dies, this tells what the sender
        // cannot.
        if let Message::Accept { ballot, view } | Message::Accepted { ballot, view } = &message {
            let newest = self.heard.get(&from).map(|(ballot, view)| (view.epoch(), *ballot));
            if newest.is_none_or(|newest| newest < (view.epoch(), *ballot)) {
                self.heard.insert(from, (*ballot, view.clone()));
            }
            if view.epoch() == self.instance() && *ballot > self.promised {
                self.follow(now, *ballot);
            }
        }
        match message {
            Message::Decided { view } => self.adopt(now, view),
            Message::Prepare { ballot, admitting, base } => {
                if base.epoch() > self.view.epoch() {
                    self.adopt(now, base.clone());
                }
                if self.is_current(from, Epoch(base.epoch().0.saturating_add(1)), true) {
                    self.handle_prepare(now, from, ballot, admitting);
                }
            }
            Message::Nudge { epoch, admitting } => {
                let boundary = !admitting || self.wants.is_some();
                let idle = self.attempt.is_none() && !self.is_led();
                if self.is_current(from, epoch, true) && boundary && idle {
                    self.lead(now);
                }
            }
            Message::Promise { epoch, ballot, accepted, dead, suspects, ready } => {
                if self.is_current(from, epoch, false) {
                    let complete = dead.iter().filter(|(_, complete)| *complete);
                    let complete = complete.map(|(peer, _)| *peer).collect();
                    let (suspects, ready) =
                        (suspects.into_iter().collect(), ready.into_iter().collect());
                    let answer = Answer { accepted, complete, suspects, ready };
                    self.handle_promise(now, from, ballot, answer, &dead);
                }
            }
            Message::Refuse { epoch, ballot, promised } => {
                if self.is_current(from, epoch, false) {
                    self.round = self.round.max(promised.round);
                    if self.attempt.as_ref().is_some_and(|attempt| attempt.ballot == ballot)
                        && promised > ballot
                    {
                        self.abandon(now);
                    }
                }
            }
            Message::Accept { ballot, view } => {
                if self.is_current(from, view.epoch(), true) && ballot.leader == from {
                    self.handle_accept(now, from, ballot, view);
                }
            }
            Message::Accepted { ballot, view } => {
                if self.is_current(from, view.epoch(), false)
                    && let Some(Attempt { ballot: mine, phase, .. }) = &mut self.attempt
                    && let Phase::Proposing { accepted, .. } = phase
                    && *mine == ballot
                {
                    accepted.insert(from);
                    self.decide_if_chosen(now);
                }
            }
        }
    }

    /// The fence: whether a message is about the view that comes next, from a member that has a say
    /// in it. A sender that asks about an older view is told what came of it.
    fn is_current(&mut self, from: Peer, epoch: Epoch, asks: bool) -> bool {
        if flawed!(self, SkipFence) {
            return self.view.contains(from);
        }
        if epoch <= self.view.epoch() && asks {
            let view = self.view.clone();
            self.send_to(from, Message::Decided { view });
        }
        epoch == self.instance() && self.view.contains(from)
    }

    fn process_of(&self, peer: Peer) -> u64 {
        let member = self.view.members().iter().find(|member| member.peer == peer);
        member.map_or(0, |member| member.process)
    }

    /// The link to a peer is lost, and nothing is known of its process.
    pub fn handle_lost(&mut self, now: Time, peer: Peer) {
        if peer != self.me && self.suspects.insert(peer) {
            self.go_on(now);
        }
    }

    /// A peer's process has ended, for certain.
    pub fn handle_dead(&mut self, now: Time, peer: Peer, proof: Proof) {
        let known = self.dead.get(&peer).copied();
        if peer != self.me && known.is_none_or(|known| known < proof) {
            self.dead.insert(peer, proof);
            self.go_on(now);
        }
    }

    /// A process that wants to join has a link to this member.
    pub fn handle_ready(&mut self, process: u64) {
        self.ready.insert(process);
    }

    /// A process that wanted to join is gone.
    pub fn handle_gone(&mut self, process: u64) {
        self.ready.remove(&process);
    }

    /// The time that [`poll_timeout`](Self::poll_timeout) named has come.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.timer.is_none_or(|due| due > now) {
            return;
        }
        self.timer = None;
        let Some(attempt) = &self.attempt else {
            self.tries += 1;
            if self.wants.is_some() {
                self.lead(now);
            } else if self.promised != Ballot::NONE {
                self.ask_what_came_of_it(now);
            }
            return;
        };
        // Rounds that interrupt each other must not prolong the wait for ever.
        let since = self.wants.map_or(attempt.began, |_| self.asked);
        let patience = self.settings.patience;
        let late = now >= since + patience && now >= attempt.began + patience / 8;
        let ballot = attempt.ballot;
        let message = match &attempt.phase {
            Phase::Gathering { admitting, answers } => {
                let (admitting, base) = (*admitting, self.view.clone());
                let missing = self.others_without(answers.keys());
                (Message::Prepare { ballot, admitting, base }, missing)
            }
            Phase::Proposing { view, accepted } => {
                let missing = self.others_without(accepted.iter());
                (Message::Accept { ballot, view: view.clone() }, missing)
            }
        };
        let (message, missing) = message;
        for to in missing {
            self.send(to, message.clone());
        }
        self.timer = Some(now + self.settings.retry);
        if late {
            self.give_up_waiting(now);
        }
    }

    /// Asks the newest leader, and the others in turn, since that leader may have been left behind
    /// itself. Whoever knows answers with the view; nobody leads for this alone.
    fn ask_what_came_of_it(&mut self, now: Time) {
        let leader = Some(self.promised.leader).filter(|_| self.is_led());
        let other = |peer: &Peer| *peer != self.me && Some(*peer) != leader && !self.is_lost(*peer);
        let others: Vec<_> = self.view.peers().filter(other).collect();
        let turn = self.questions as usize;
        if turn >= MAX_QUESTIONS.max(2 * others.len()) {
            return;
        }
        self.questions += 1;
        let other = others.get(turn % others.len().max(1)).copied();
        let epoch = self.instance();
        for whom in leader.into_iter().chain(other) {
            self.send_to(whom, Message::Nudge { epoch, admitting: true });
            self.timer = Some(now + self.backoff());
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) should be called.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timer
    }

    /// The next message to hand to a link. One that has no link is dropped.
    pub fn poll_transmit(&mut self) -> Option<Outgoing> {
        self.transmits.pop_front()
    }

    /// The next event, once all messages have been handed out.
    pub fn poll_event(&mut self) -> Option<Event> {
        if self.transmits.is_empty() { self.events.pop_front() } else { None }
    }

    /// The number of the view that comes next.
    fn instance(&self) -> Epoch {
        Epoch(self.view.epoch().0.saturating_add(1))
    }

    fn is_lost(&self, peer: Peer) -> bool {
        self.dead.contains_key(&peer) || self.suspects.contains(&peer)
    }

    /// How long to wait before doing anything about a silence. Higher members wait longer, so that
    /// one of them leads at a time.
    fn backoff(&self) -> Duration {
        let alive = self.view.peers().filter(|peer| !self.is_lost(*peer));
        let place = alive.take_while(|peer| *peer != self.me).count() as u32;
        self.settings.retry * (1 + place) * (1 << self.tries.min(6))
    }

    /// All members but this one, those that are proven dead, and these.
    fn others_without<'a>(&self, these: impl Iterator<Item = &'a Peer>) -> Vec<Member> {
        let these: BTreeSet<_> = these.copied().collect();
        let members = self.view.members().iter().copied();
        let wanted = |member: &Member| {
            member.peer != self.me
                && !these.contains(&member.peer)
                && !self.dead.contains_key(&member.peer)
        };
        members.filter(wanted).collect()
    }

    fn send(&mut self, to: Member, message: Message) {
        self.transmits.push_back(Outgoing { to, message });
    }

    fn send_to(&mut self, peer: Peer, message: Message) {
        let to = Member { peer, process: self.process_of(peer) };
        self.send(to, message);
    }

    /// Starts a round.
    fn lead(&mut self, now: Time) {
        let Some(round) = self.round.max(self.promised.round).checked_add(1) else { return };
        let ballot = Ballot { round, leader: self.me };
        let admitting = self.wants == Some(Want::Admit);
        self.round = round;
        self.promised = ballot;
        self.deferred = None;
        let answers = BTreeMap::from([(self.me, self.answer())]);
        self.attempt =
            Some(Attempt { ballot, began: now, phase: Phase::Gathering { admitting, answers } });
        self.timer = Some(now + self.settings.retry);
        let base = self.view.clone();
        for to in self.others_without([].iter()) {
            self.send(to, Message::Prepare { ballot, admitting, base: base.clone() });
        }
        self.propose_if_gathered(now, false);
    }

    /// This member's round has come to nothing, for now.
    fn abandon(&mut self, now: Time) {
        self.attempt = None;
        self.tries += 1;
        self.timer = self.wants.map(|_| now + self.backoff());
    }

    /// What this member says to a leader.
    fn answer(&self) -> Answer {
        let instance = self.instance();
        let heard = self.heard.values().filter(|(_, view)| view.epoch() == instance);
        let accepted = heard.chain(&self.accepted).max_by_key(|(accepted, _)| *accepted).cloned();
        let complete = self.dead.iter().filter(|(_, proof)| **proof == Proof::Complete);
        let complete = complete.map(|(peer, _)| *peer).collect();
        let suspects = self.suspects.iter().copied();
        let suspects = suspects.filter(|peer| self.view.contains(*peer)).collect();
        let ready = match self.wants {
            Some(Want::Admit) => self.ready.iter().copied().take(MAX_READY).collect(),
            _ => BTreeSet::new(),
        };
        Answer { accepted, complete, suspects, ready }
    }

    fn promise(&mut self, ballot: Ballot) {
        let Answer { accepted, suspects, ready, .. } = self.answer();
        let dead = self.dead.iter().filter(|(peer, _)| self.view.contains(**peer));
        let dead = dead.map(|(peer, proof)| (*peer, *proof == Proof::Complete)).collect();
        let message = Message::Promise {
            epoch: self.instance(),
            ballot,
            accepted,
            dead,
            suspects: suspects.into_iter().collect(),
            ready: ready.into_iter().collect(),
        };
        self.send_to(ballot.leader, message);
    }

    fn refuse(&mut self, to: Peer, ballot: Ballot) {
        let (epoch, promised) = (self.instance(), self.promised);
        self.send_to(to, Message::Refuse { epoch, ballot, promised });
    }

    /// Another member leads: this one's own round, if it has one, is over.
    fn follow(&mut self, now: Time, ballot: Ballot) {
        self.promised = ballot;
        self.questions = 0;
        self.round = self.round.max(ballot.round);
        if self.attempt.as_ref().is_some_and(|attempt| attempt.ballot < ballot) {
            self.attempt = None;
        }
        self.timer = Some(now + self.backoff());
    }

    fn handle_prepare(&mut self, now: Time, from: Peer, ballot: Ballot, admitting: bool) {
        if ballot < self.promised || ballot.leader != from {
            return self.refuse(from, ballot);
        }
        self.follow(now, ballot);
        // A member that has lost somebody will not come to a step boundary.
        if admitting && self.wants.is_none() && self.lost().next().is_none() {
            self.deferred = Some(ballot);
        } else {
            self.promise(ballot);
        }
    }

    fn handle_promise(
        &mut self,
        now: Time,
        from: Peer,
        ballot: Ballot,
        answer: Answer,
        dead: &[(Peer, bool)],
    ) {
        let Some(Attempt { ballot: mine, phase: Phase::Gathering { answers, .. }, .. }) =
            &mut self.attempt
        else {
            return;
        };
        if *mine != ballot {
            return;
        }
        answers.insert(from, answer);
        // That they are dead is true for all. Whether all they sent was read is known only to the
        // member that has the proof, and only for this view.
        for (peer, _) in dead.iter().filter(|(peer, _)| *peer != self.me) {
            self.dead.entry(*peer).or_insert(Proof::Ended);
        }
        self.propose_if_gathered(now, false);
    }

    fn handle_accept(&mut self, now: Time, from: Peer, ballot: Ballot, view: View) {
        if ballot < self.promised {
            return self.refuse(from, ballot);
        }
        self.follow(now, ballot);
        let again = self.accepted.as_ref().is_some_and(|(accepted, _)| *accepted == ballot);
        self.accepted = Some((ballot, view.clone()));
        let message = Message::Accepted { ballot, view };
        if flawed!(self, TellLeaderFirst) {
            self.send_to(from, message.clone());
        }
        if !again {
            for to in self.others_without([from].iter()) {
                self.send(to, message.clone());
            }
        }
        if !flawed!(self, TellLeaderFirst) {
            self.send_to(from, message);
        }
    }

    /// Something has become known that may be the last thing waited for.
    fn go_on(&mut self, now: Time) {
        if self.is_evicted() {
            return;
        }
        if let Some(ballot) = self.deferred.take().filter(|ballot| *ballot == self.promised) {
            self.promise(ballot);
        }
        match self.attempt.as_ref().map(|attempt| &attempt.phase) {
            Some(Phase::Gathering { .. }) => self.propose_if_gathered(now, false),
            Some(Phase::Proposing { .. }) => self.decide_if_chosen(now),
            None if self.wants.is_some() && !self.is_led() => self.call_for_leader(now),
            None => {}
        }
    }

    /// The members that have not answered will not, or are too slow.
    fn give_up_waiting(&mut self, now: Time) {
        match self.attempt.as_ref().map(|attempt| &attempt.phase) {
            Some(Phase::Gathering { .. }) => self.propose_if_gathered(now, true),
            Some(Phase::Proposing { .. }) => self.abandon(now),
            None => {}
        }
    }

    /// Proposes a view once all that can be expected to answer have answered; with `now_or_never`,
    /// without waiting for the rest.
    fn propose_if_gathered(&mut self, now: Time, now_or_never: bool) {
        let Some(Attempt { ballot, phase: Phase::Gathering { answers, .. }, .. }) = &self.attempt
        else {
            return;
        };
        let ballot = *ballot;
        let waits = |peer: Peer| !answers.contains_key(&peer) && !self.is_lost(peer);
        if self.view.peers().any(waits) && !now_or_never {
            return;
        }
        let reached: BTreeSet<_> = answers.keys().copied().collect();
        let complete = answers.values().flat_map(|answer| answer.complete.iter().copied());
        let known: BTreeSet<_> = reached.iter().copied().chain(complete).collect();
        if !self.may_propose(&known) || !self.is_enough(&reached) {
            return self.report_no_quorum(now, &reached);
        }
        let newest = answers.values().filter_map(|answer| answer.accepted.as_ref());
        let newest = newest.max_by_key(|(accepted, _)| *accepted);
        let newest = newest.filter(|_| !flawed!(self, ReuseEpoch));
        let view = match newest {
            Some((_, view)) => view.clone(),
            None => match self.next_view(answers) {
                Some(view) => view,
                None => return self.report_no_quorum(now, &reached),
            },
        };
        if flawed!(self, DropSecondRound) {
            return self.decide(now, view);
        }
        self.accepted = Some((ballot, view.clone()));
        for to in self.others_without([].iter()) {
            self.send(to, Message::Accept { ballot, view: view.clone() });
        }
        let accepted = BTreeSet::from([self.me]);
        if let Some(attempt) = &mut self.attempt {
            attempt.phase = Phase::Proposing { view, accepted };
        }
        self.timer = Some(now + self.settings.retry);
        self.decide_if_chosen(now);
    }

    /// The members that answered and can reach each other, and one joiner that all of them can let
    /// in.
    fn next_view(&self, answers: &BTreeMap<Peer, Answer>) -> Option<View> {
        let mut stay: BTreeSet<Peer> =
            answers.keys().copied().filter(|peer| !self.dead.contains_key(peer)).collect();
        let apart = |one: Peer, other: Peer| {
            answers[&one].suspects.contains(&other) || answers[&other].suspects.contains(&one)
        };
        // The member that is out of reach of the most others goes first; of several, the highest.
        loop {
            let cut_off = |peer: &Peer| {
                stay.iter().filter(|other| *other != peer && apart(*peer, **other)).count()
            };
            let Some((most, worst)) = stay.iter().map(|peer| (cut_off(peer), *peer)).max() else {
                break;
            };
            if most == 0 {
                break;
            }
            stay.remove(&worst);
        }
        let all_have = |process: &u64| {
            let has = |peer: &Peer| answers[peer].ready.contains(process);
            if flawed!(self, AdmitOnSubset) {
                return stay.iter().any(has);
            }
            stay.iter().all(has)
        };
        let known = |process: &u64| self.view.find(*process).is_none();
        let room = stay.len() < MAX_MEMBERS;
        let waiting = stay.iter().flat_map(|peer| answers[peer].ready.iter().copied());
        let joiner = waiting.filter(|process| room && all_have(process) && known(process)).min();
        self.view.next(|peer| stay.contains(&peer), joiner)
    }

    /// Whether the others cannot have decided anything. `known` have promised, or are dead and were
    /// heard to the end.
    fn may_propose(&self, known: &BTreeSet<Peer>) -> bool {
        let unknown: Vec<_> = self
            .view
            .peers()
            .filter(|peer| !known.contains(peer))
            .filter(|peer| !(flawed!(self, TrustAnyProof) && self.dead.contains_key(peer)))
            .collect();
        let (twice, all) = (2 * unknown.len(), self.view.members().len());
        let lowest = self.view.peers().next();
        let without_lowest = lowest.is_none_or(|lowest| !unknown.contains(&lowest));
        let tie = self.settings.ties == TieRule::Neither
            || without_lowest
            || flawed!(self, ForgetTieRule);
        twice < all || (twice == all && tie)
    }

    /// Whether the acceptances of these members decide.
    fn is_enough(&self, accepted: &BTreeSet<Peer>) -> bool {
        let count = self.view.peers().filter(|peer| accepted.contains(peer)).count();
        let all = self.view.members().len();
        let lowest = self.view.peers().next().is_some_and(|lowest| accepted.contains(&lowest));
        let tie = self.settings.ties == TieRule::Lowest && lowest;
        let tie = tie || flawed!(self, ForgetTieRule);
        let alive = |peer: &Peer| !self.dead.contains_key(peer);
        2 * count > all
            || (2 * count == all && tie)
            || self.view.peers().filter(alive).all(|peer| accepted.contains(&peer))
    }

    fn decide_if_chosen(&mut self, now: Time) {
        let Some(Attempt { phase: Phase::Proposing { view, accepted }, .. }) = &self.attempt else {
            return;
        };
        if self.is_enough(accepted) {
            let view = view.clone();
            return self.decide(now, view);
        }
        let waits = |peer: Peer| !accepted.contains(&peer) && !self.is_lost(peer);
        if !self.view.peers().any(waits) {
            let accepted = accepted.clone();
            self.report_no_quorum(now, &accepted);
        }
    }

    /// Tells everyone of the next view.
    fn decide(&mut self, now: Time, view: View) {
        for to in self.others_without([].iter()) {
            self.send(to, Message::Decided { view: view.clone() });
        }
        self.adopt(now, view);
    }

    fn report_no_quorum(&mut self, now: Time, reached: &BTreeSet<Peer>) {
        let asked = self.wants.take().is_some();
        self.abandon(now);
        if asked {
            let missing = |peer: &Peer| !reached.contains(peer) && !self.dead.contains_key(peer);
            let missing = self.view.peers().filter(missing).collect();
            let reached = reached.iter().copied().collect();
            self.events.push_back(Event::NoQuorum { reached, missing });
        }
    }

    /// Goes on to a view that was decided.
    fn adopt(&mut self, now: Time, view: View) {
        if view.epoch() <= self.view.epoch() || self.is_evicted() {
            return;
        }
        self.wants = None;
        self.attempt = None;
        self.deferred = None;
        self.timer = None;
        self.promised = Ballot::NONE;
        self.accepted = None;
        (self.round, self.tries) = (0, 0);
        if !view.contains(self.me) {
            self.evicted = Some(view.clone());
            self.events.push_back(Event::Evicted(view));
            return;
        }
        for member in view.members() {
            self.ready.remove(&member.process);
            // A new member is told by all: it waits, and the leader may not live to tell it.
            if !self.view.contains(member.peer) {
                self.send(*member, Message::Decided { view: view.clone() });
            }
        }
        self.view = view.clone();
        let instance = self.instance();
        let heard = self.heard.values().filter(|(_, view)| view.epoch() == instance);
        if let Some(newest) = heard.map(|(ballot, _)| *ballot).max() {
            self.follow(now, newest);
        }
        self.events.push_back(Event::Changed(view));
    }
}

#[cfg(test)]
mod tests;

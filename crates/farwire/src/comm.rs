//! The API: collectives and messages.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use farwire_proto::{
    Call, CommId, Counts, Element, Epoch, OpenError, Options, Peer, Placement, Rank, ReduceOp, Tag,
    WorldSize,
};

use crate::calls::{Calls, Handler};
use crate::completion::Completion;
use crate::driver::Traffic;
use crate::driver::members::{Change, MembershipError};
use crate::error::{Error, SubgroupError};
use crate::in_place::InPlace;
use crate::link::NetworkPath;
use crate::memory::{self, Buffer, Memory};
use crate::node::Membership;
use crate::observe::flight::Flight;
use crate::pending::Pending;

/// A group of ranks, and this process's place in it.
///
/// All ranks of the group must make the same calls in the same order. If they do not, they get an
/// error that shows what each side called. Several calls may be in flight at once. Cloning is cheap
/// and gives another handle to the same group.
#[derive(Clone)]
pub struct Communicator {
    node: Arc<Membership>,
    group: Arc<Group>,
    options: Options,
}

struct Group {
    /// Set by the first registration or call. Dropped before the membership.
    calls: OnceLock<Calls>,
    node: Arc<Membership>,
    id: CommId,
    /// Only for the group of all members, which may change.
    epoch: Option<Epoch>,
    rank: Rank,
    members: Arc<[Peer]>,
    splits: AtomicU32,
    /// How often each subgroup has been made, by the id it had the first time.
    subgroups: Mutex<HashMap<CommId, u32>>,
    starting: Mutex<()>,
}

impl Drop for Group {
    fn drop(&mut self) {
        // The driver closes the communicators of all members when they are replaced.
        if self.epoch.is_none() {
            self.node.driver().close_comm(self.id);
        }
    }
}

impl Communicator {
    /// The communicator of all processes.
    pub(crate) fn of_world(node: Arc<Membership>) -> Result<Self, Error> {
        let (rank, world) = node.driver().place(CommId::WORLD)?;
        let members = (0..world.get()).map(Peer).collect();
        Ok(Self::new(node, Some(Epoch(0)), CommId::WORLD, rank, members, Options::default()))
    }

    /// The communicator of all members of the newest view that this process knows.
    pub(crate) fn of_newest(node: Arc<Membership>, options: Options) -> Result<Self, Error> {
        let (view, me) = {
            let driver = node.driver();
            (driver.view().ok_or(MembershipError::TooLarge)?.clone(), driver.me())
        };
        let rank = view.rank_of(me).ok_or(OpenError::NotAMember)?;
        let members = view.peers().collect();
        Ok(Self::new(node, Some(view.epoch()), view.comm(), rank, members, options))
    }

    fn new(
        node: Arc<Membership>,
        epoch: Option<Epoch>,
        id: CommId,
        rank: Rank,
        members: Vec<Peer>,
        options: Options,
    ) -> Self {
        let splits = AtomicU32::new(0);
        let group = Arc::new(Group {
            node: node.clone(),
            epoch,
            id,
            rank,
            members: members.into(),
            splits,
            subgroups: Mutex::default(),
            calls: OnceLock::new(),
            starting: Mutex::default(),
        });
        Self { node, group, options }
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> usize {
        self.group.rank.index()
    }

    /// How many ranks the group has.
    pub fn size(&self) -> usize {
        self.group.members.len()
    }

    /// What this process has sent since it joined, to all peers, on all of its communicators.
    pub fn traffic(&self) -> Traffic {
        self.node.driver().traffic()
    }

    /// What this process has sent to a rank since it joined, on all of its communicators; `None` if
    /// there is no such rank.
    pub fn traffic_to(&self, rank: usize) -> Option<Traffic> {
        self.node.driver().traffic_to(*self.group.members.get(rank)?)
    }

    /// Which ranks share a host.
    pub fn placement(&self) -> Result<Placement, Error> {
        self.node.driver().placement(self.group.id)
    }

    /// The placement, if an all-reduce of floats adds up on each host first. It does if there are
    /// several hosts, some of them with several ranks, and nobody asked for
    /// [`SumOrder::Rank`](crate::SumOrder::Rank).
    pub fn split_placement(&self) -> Option<Placement> {
        self.node.driver().split_placement(self.group.id)
    }

    /// The network between this rank and another: round trip, loss, window. `None` where the two
    /// share memory, and for a rank that is lost.
    pub fn path(&self, rank: usize) -> Option<NetworkPath> {
        self.node.driver().path(*self.group.members.get(rank)?)
    }

    /// The same group, with other settings for the calls made through this handle: algorithm,
    /// segment, deadline. All ranks must give the same ones, except for the deadline.
    pub fn with_options(&self, options: Options) -> Self {
        Self { options, ..self.clone() }
    }

    /// Everyone gets the combination of everyone's vector.
    ///
    /// Floats are combined in an order that depends on nothing but where ranks are, so the result
    /// has the same bits on every rank, in every run, for any size: in rank order, or where some
    /// ranks share a host, host by host ([`SumOrder`](crate::SumOrder)).
    pub fn all_reduce<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.start(Call::AllReduce { count: data.len(), dtype: T::DTYPE, op }, data, unwrap)
    }

    /// Combines everyone's vector, and gives each rank its block of the result. Blocks are as even
    /// as possible; the first ones are longer.
    pub fn reduce_scatter<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.start(Call::ReduceScatter { count: data.len(), dtype: T::DTYPE, op }, data, unwrap)
    }

    /// Everyone gets everyone's vector, one after the other in rank order. All must have the same
    /// length; see [`all_gather_varied`](Self::all_gather_varied).
    pub fn all_gather<T: Element>(&self, data: Vec<T>) -> Pending<Vec<T>> {
        self.start(
            Call::AllGather { counts: Counts::Each(data.len()), dtype: T::DTYPE },
            data,
            unwrap,
        )
    }

    /// [`all_gather`](Self::all_gather) of vectors that differ in length: `counts[r]` elements from
    /// rank r.
    pub fn all_gather_varied<T: Element>(&self, data: Vec<T>, counts: &[usize]) -> Pending<Vec<T>> {
        self.start(
            Call::AllGather { counts: Counts::listed(counts, self.world()), dtype: T::DTYPE },
            data,
            unwrap,
        )
    }

    /// Everyone gets the root's vector, of `count` elements. The others need not give one.
    ///
    /// ```
    /// # std::thread::scope(|scope| for comm in farwire::local(2).unwrap() { scope.spawn(move || {
    /// let mine = (comm.rank() == 0).then(|| vec![1u8, 2, 3]);
    /// assert_eq!(comm.broadcast(mine, 3, 0).wait().unwrap(), [1, 2, 3]);
    /// # }); });
    /// ```
    pub fn broadcast<T: Element>(
        &self,
        data: Option<Vec<T>>,
        count: usize,
        root: usize,
    ) -> Pending<Vec<T>> {
        let call = Call::Broadcast { count, dtype: T::DTYPE, root: rank(root) };
        self.start(call, self.roots(data, root), unwrap)
    }

    /// The root gets the combination of everyone's vector; the others get `None`.
    pub fn reduce<T: Element>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
        root: usize,
    ) -> Pending<Option<Vec<T>>> {
        let call = Call::Reduce { count: data.len(), dtype: T::DTYPE, op, root: rank(root) };
        self.start(call, data, if root == self.rank() { unwrap_some } else { nothing })
    }

    /// The root gets everyone's vector, one after the other in rank order; the others get `None`.
    /// All must have the same length.
    pub fn gather<T: Element>(&self, data: Vec<T>, root: usize) -> Pending<Option<Vec<T>>> {
        let call =
            Call::Gather { counts: Counts::Each(data.len()), dtype: T::DTYPE, root: rank(root) };
        self.start(call, data, if root == self.rank() { unwrap_some } else { nothing })
    }

    /// Each rank gets its `count` elements of the root's vector. The others need not give one.
    pub fn scatter<T: Element>(
        &self,
        data: Option<Vec<T>>,
        count: usize,
        root: usize,
    ) -> Pending<Vec<T>> {
        let call = Call::Scatter { counts: Counts::Each(count), dtype: T::DTYPE, root: rank(root) };
        self.start(call, self.roots(data, root), unwrap)
    }

    /// Rank i's block j becomes rank j's block i. The vector is cut into equal blocks, one per
    /// rank.
    pub fn all_to_all<T: Element>(&self, data: Vec<T>) -> Pending<Vec<T>> {
        let each = Counts::Each(data.len() / self.size());
        self.start(Call::AllToAll { send: each.clone(), recv: each, dtype: T::DTYPE }, data, unwrap)
    }

    /// [`all_to_all`](Self::all_to_all) with blocks that differ: `send[r]` elements to rank r,
    /// `recv[r]` elements from it.
    pub fn all_to_all_varied<T: Element>(
        &self,
        data: Vec<T>,
        send: &[usize],
        recv: &[usize],
    ) -> Pending<Vec<T>> {
        let call = Call::AllToAll {
            send: Counts::listed(send, self.world()),
            recv: Counts::listed(recv, self.world()),
            dtype: T::DTYPE,
        };
        self.start(call, data, unwrap)
    }

    /// Rank r gets the combination of the vectors of ranks 0 to r, its own included.
    pub fn scan<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.start(Call::Scan { count: data.len(), dtype: T::DTYPE, op }, data, unwrap)
    }

    /// Rank r gets the combination of the vectors of the ranks before it; rank 0 gets the
    /// operator's identity.
    pub fn exclusive_scan<T: Element>(&self, data: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        self.start(Call::ExclusiveScan { count: data.len(), dtype: T::DTYPE, op }, data, unwrap)
    }

    /// Completes once every rank has called it.
    pub fn barrier(&self) -> Pending<()> {
        self.start(Call::Barrier, Vec::<u8>::new(), |_| ())
    }

    /// Makes any call on a vector: what the other methods do, with the call as a value. A rank
    /// with no input for the call gives an empty vector, and a rank with no result gets one.
    ///
    /// ```
    /// use farwire::{Call, DType, ReduceOp};
    ///
    /// # std::thread::scope(|scope| for comm in farwire::local(2).unwrap() { scope.spawn(move || {
    /// let call = Call::Scan { count: 1, dtype: DType::U32, op: ReduceOp::Sum };
    /// assert_eq!(comm.run(call, vec![5u32]).wait().unwrap(), [5 * (comm.rank() as u32 + 1)]);
    /// # }); });
    /// ```
    pub fn run<T: Element>(&self, call: Call, data: Vec<T>) -> Pending<Vec<T>> {
        self.start(call, data, |result| if result.is_empty() { Vec::new() } else { unwrap(result) })
    }

    /// Sends a message. Messages to one rank with one tag arrive in the order they were sent.
    ///
    /// The send is complete when the data has left the vector, not when it has arrived.
    pub fn send<T: Element>(&self, data: Vec<T>, to: usize, tag: u32) -> Pending<()> {
        self.start(
            Call::Send { to: rank(to), tag: Tag(tag), count: data.len(), dtype: T::DTYPE },
            data,
            |_| (),
        )
    }

    /// Receives the next message of `count` elements from one rank with one tag.
    pub fn recv<T: Element>(&self, count: usize, from: usize, tag: u32) -> Pending<Vec<T>> {
        let call = Call::Recv { from: rank(from), tag: Tag(tag), count, dtype: T::DTYPE };
        self.start(call, Vec::<T>::new(), unwrap)
    }

    /// Has `handler` answer the calls that any rank of the group makes by this name. It is given
    /// the caller's rank and the request, and returns the response, or what went wrong.
    ///
    /// Handlers run on threads of their own, several at once, and may take their time. A call that
    /// arrives before this rank has registered anything waits until it has; a call by a name that
    /// is not registered fails. Registering a name again replaces its handler. A handler that makes
    /// calls holds a clone of the communicator, until [`shutdown`](Self::shutdown).
    pub fn register<F>(&self, name: &str, handler: F) -> Result<(), Error>
    where
        F: Fn(usize, Vec<u8>) -> Result<Vec<u8>, String> + Send + Sync + 'static,
    {
        let handler: Arc<Handler> = Arc::new(handler);
        self.calls(Some((name, handler.clone())))?.register(name, handler);
        Ok(())
    }

    /// Calls a handler on another rank, or on this one. The response must come within `deadline`.
    pub fn call(
        &self,
        to: usize,
        name: &str,
        request: Vec<u8>,
        deadline: Duration,
    ) -> Pending<Vec<u8>> {
        let completion = Arc::new(Completion::default());
        let called = self
            .calls(None)
            .and_then(|calls| calls.call(rank(to), name, request, deadline, &completion));
        match called {
            Err(error) => Pending::ready(Err(error)),
            Ok(()) => Pending::running(self.node.clone(), self.members(), completion, unwrap),
        }
    }

    /// This group's calls, started if need be, with a first handler if one is given.
    fn calls(&self, first: Option<(&str, Arc<Handler>)>) -> Result<&Calls, Error> {
        if let Some(calls) = self.group.calls.get() {
            return Ok(calls);
        }
        let _one_at_a_time = self.group.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.group.calls.get().is_none() {
            let Group { id, rank, members, .. } = &*self.group;
            let calls = Calls::start(self.node.downgrade(), *id, *rank, members, first)?;
            self.group.calls.set(calls).expect("one at a time");
        }
        Ok(self.group.calls.get().expect("it was just set"))
    }

    /// What this process has been doing: its last operations, and which ranks those in flight wait
    /// for. See [`flight`](crate::flight).
    pub fn flight(&self) -> Flight {
        self.node.driver().flight("asked")
    }

    /// Splits the group: ranks that give the same color form a new one, ordered by key and then by
    /// rank. All ranks must call it.
    pub fn split(&self, color: u32, key: u32) -> Result<Self, Error> {
        let choices = self.all_gather(vec![color, key]).wait()?;
        let mut chosen: Vec<_> = choices
            .chunks_exact(2)
            .zip(&*self.group.members)
            .enumerate()
            .filter(|(_, (choice, _))| choice[0] == color)
            .map(|(rank, (choice, peer))| (choice[1], rank, *peer))
            .collect();
        chosen.sort_unstable();
        let members: Vec<_> = chosen.iter().map(|(_, _, peer)| *peer).collect();
        let place = chosen
            .iter()
            .position(|(_, rank, _)| *rank == self.rank())
            .ok_or(OpenError::NotAMember)?;
        // Every rank of this group splits it equally often, so all members derive the same id.
        let split = self.group.splits.fetch_add(1, Ordering::Relaxed);
        let id = self.group.id.child(split, color);
        self.node.driver().open(id, &members)?;
        Ok(Self::new(self.node.clone(), None, id, Rank(place as u32), members, self.options))
    }

    /// Makes a group of some of this group's ranks. Only those ranks call this; the others need not
    /// know of it.
    ///
    /// A member's rank in the new group is its place in `ranks`. All members must give the same
    /// `ranks`, in the same order, and the same name; a member that gives another name waits for
    /// others that do, until its deadline. Members may make a group of the same name and ranks
    /// several times, and get a new group each time: each member's first joins the others' first,
    /// its second the others' second, and so on.
    ///
    /// ```
    /// # use farwire::ReduceOp;
    /// # std::thread::scope(|scope| for comm in farwire::local(5).unwrap() { scope.spawn(move || {
    /// if comm.rank() % 2 == 0 {
    ///     let even = comm.subgroup(&[0, 2, 4], "even").unwrap();
    ///     assert_eq!(even.all_reduce(vec![comm.rank() as u32], ReduceOp::Sum).wait().unwrap(), [6]);
    /// }
    /// # }); });
    /// ```
    pub fn subgroup(&self, ranks: &[usize], name: &str) -> Result<Self, Error> {
        let size = self.size();
        if let Some(rank) = ranks.iter().find(|rank| **rank >= size) {
            return Err(SubgroupError::NoSuchRank { rank: *rank, size }.into());
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(SubgroupError::Twice { rank: twice[0] }.into());
        }
        let Some(place) = ranks.iter().position(|rank| *rank == self.rank()) else {
            return Err(SubgroupError::NotAMember { rank: self.rank() }.into());
        };
        // Members that differ only in the order meet on one communicator, and find that out there.
        let peers: Vec<_> = sorted.iter().map(|rank| self.group.members[*rank]).collect();
        let nth = {
            let first = self.group.id.subgroup(name, &peers, 0);
            let mut made = self.group.subgroups.lock().unwrap_or_else(PoisonError::into_inner);
            let next = made.entry(first).or_insert(0);
            let nth = *next;
            *next += 1;
            nth
        };
        let id = self.group.id.subgroup(name, &peers, nth);
        let members: Vec<_> = ranks.iter().map(|rank| self.group.members[*rank]).collect();
        self.node.driver().open(id, &members)?;
        Ok(Self::new(self.node.clone(), None, id, Rank(place as u32), members, self.options))
    }

    /// The group's epoch, which grows each time its members change.
    pub fn epoch(&self) -> Option<u32> {
        self.group.epoch.map(|epoch| epoch.0)
    }

    /// Makes the group without the ranks that are lost. Every survivor gets the same group, of the
    /// same members in the same order, with ranks that have no gaps; or an error.
    ///
    /// Call this when a call has failed, on the communicator of all ranks, on every rank that is
    /// left. It depends on no rank in particular: any may be lost, more may be lost while this
    /// runs, and callers need not know which. This communicator, and those split off it, are of no
    /// more use; its late frames are dropped. If nobody is lost (a deadline passed, or ranks were
    /// out of step), the new group has all ranks.
    ///
    /// When a network is cut in two, the side with the majority goes on, and the other side gets
    /// [`MembershipError::NoQuorum`]; of two halves, [`Builder::ties`] says which one goes on. A
    /// rank whose process is known to have ended does not count, so all but one may be killed.
    /// [`farwire_proto::membership`] says exactly what is enough, and why.
    ///
    /// ```no_run
    /// # use farwire::{Communicator, Error, ReduceOp};
    /// # fn step(mut comm: Communicator, gradient: Vec<f32>) -> Result<Vec<f32>, Error> {
    /// loop {
    ///     match comm.all_reduce(gradient.clone(), ReduceOp::Mean).wait() {
    ///         Ok(mean) => return Ok(mean),
    ///         Err(_lost) => comm = comm.shrink()?,
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// [`Builder::ties`]: crate::Builder::ties
    pub fn shrink(&self) -> Result<Self, Error> {
        self.change(Change::Shrink)
    }

    /// Lets in one process that waits to join, if there is one and
    /// [room](crate::Builder::max_ranks) for it. All ranks call this at the same point, between two
    /// steps, and get the same group: this one, if nobody is let in.
    ///
    /// The newcomer's rank is the last. It has none of the others' data: give it what it needs
    /// before the next step. If a rank is lost meanwhile, the new group may lack both that rank and
    /// the newcomer, on all ranks alike; or this fails, and [`shrink`](Self::shrink) is the way on.
    pub fn admit(&self) -> Result<Self, Error> {
        if self.group.epoch.is_none() {
            return Err(MembershipError::Part.into());
        }
        if self.find_waiting().wait()? { self.change(Change::Admit) } else { Ok(self.clone()) }
    }

    /// Whether a process waits to join that [`admit`](Self::admit) could let in. All ranks must
    /// ask, and all get the same answer.
    pub(crate) fn find_waiting(&self) -> Pending<bool> {
        let mut driver = self.node.driver();
        let waiting = if driver.is_full() { 0 } else { driver.waiting() as u32 };
        drop(driver);
        // The minimum: a process counts once it has a link to every rank. One that is stuck
        // half-way costs nothing.
        let call = Call::AllReduce { count: 1, dtype: u32::DTYPE, op: ReduceOp::Min };
        self.start(call, vec![waiting], |least| unwrap::<u32>(least) != [0])
    }

    /// How many processes wait to join, as far as this rank knows.
    pub fn waiting(&self) -> usize {
        self.node.driver().waiting()
    }

    /// Waits until another rank has said goodbye, or is lost; no longer than an operation may take.
    pub(crate) fn wait_until_gone(&self, rank: usize) {
        let peer = self.group.members[rank];
        let after = self.options.deadline.unwrap_or(self.node.driver().deadline());
        let begin = Instant::now();
        self.node.drive_until_true(|| self.node.driver().let_go(peer) || begin.elapsed() > after);
    }

    fn change(&self, change: Change) -> Result<Self, Error> {
        let epoch = self.group.epoch.ok_or(MembershipError::Part)?;
        let after = {
            let mut driver = self.node.driver();
            driver.ask_for(change, epoch)?;
            self.options.deadline.unwrap_or(driver.deadline())
        };
        let begin = Instant::now();
        self.node.drive_until_true(|| {
            self.node.driver().answer(epoch).is_some() || begin.elapsed() > after
        });
        let answer = self.node.driver().answer(epoch);
        answer.unwrap_or(Err(MembershipError::TimedOut { after }))?;
        Self::of_newest(self.node.clone(), self.options)
    }

    /// Whether all ranks hold the same data: the same bits everywhere.
    pub fn is_in_sync<T: Element>(&self, data: &[T]) -> Result<bool, Error> {
        let digest = digest(bytemuck::cast_slice(data));
        let all = self.all_gather(vec![digest, data.len() as u64]).wait()?;
        Ok(all.chunks_exact(2).all(|theirs| theirs == [digest, data.len() as u64]))
    }

    /// Leaves the group in good order: returns once every rank has called this, so that nothing is
    /// lost.
    ///
    /// Drops the handlers of calls, with any communicators that they hold.
    pub fn shutdown(self) -> Result<(), Error> {
        let left = self.barrier().wait();
        if let Some(calls) = self.group.calls.get() {
            calls.clear();
        }
        left
    }

    /// The collectives that can work in place: in a vector, or in memory that somebody else owns.
    pub fn in_place(&self) -> InPlace<'_> {
        InPlace::new(self)
    }

    /// [`all_reduce`](Self::all_reduce) in place, blocking: the result is where the input was, and
    /// there is no second copy of it. All ranks must make this call, or [`InPlace::all_reduce`].
    ///
    /// A call that is refused leaves the vector as it was. One that fails half-way may leave
    /// anything in it.
    pub fn all_reduce_in_place<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        self.lend(data, |memory| self.in_place().all_reduce(memory, op))
    }

    /// [`broadcast`](Self::broadcast) in place, blocking: all ranks give vectors of the same
    /// length, which hold the root's data afterwards. A call that fails half-way may leave anything
    /// in the others' vectors.
    pub fn broadcast_in_place<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.lend(data, |memory| self.in_place().broadcast(memory, root))
    }

    fn lend<T: Element>(
        &self,
        data: &mut [T],
        start: impl FnOnce(Memory<T>) -> Pending<Memory<T>>,
    ) -> Result<(), Error> {
        memory::lend(
            data,
            || self.node.call_keeper(),
            |memory| match start(memory).wait() {
                Ok(_done) => Ok(()),
                Err(mut error) => {
                    drop(error.take_memory::<T>()); // the caller has it
                    Err(error)
                }
            },
        )
    }

    pub(crate) fn node(&self) -> &Arc<Membership> {
        &self.node
    }

    pub(crate) fn id(&self) -> CommId {
        self.group.id
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// The members of a group that is not the world.
    pub(crate) fn members(&self) -> Option<Arc<[Peer]>> {
        (self.group.id != CommId::WORLD).then(|| self.group.members.clone())
    }

    fn world(&self) -> WorldSize {
        WorldSize::new(self.size() as u32).expect("this process is a member")
    }

    /// `data` on the root, and an empty vector on all other ranks.
    fn roots<T: Element>(&self, data: Option<Vec<T>>, root: usize) -> Vec<T> {
        data.filter(|_| root == self.rank()).unwrap_or_default()
    }

    pub(crate) fn start<R>(
        &self,
        call: Call,
        data: impl Into<Buffer>,
        finish: fn(Buffer) -> R,
    ) -> Pending<R> {
        let completion = self.node.completion();
        let data = data.into();
        let long = data.bytes().len() > OVERLAP_FROM;
        let submitted = self.node.driver().submit(
            self.group.id,
            &call,
            &self.options,
            data,
            completion.clone(),
        );
        match submitted {
            Err(error) => Pending::ready(Err(error.in_group(&self.members()))),
            Ok(()) => {
                if long {
                    self.node.call_keeper();
                }
                Pending::running(self.node.clone(), self.members(), completion, finish)
            }
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("id", &self.group.id)
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

/// Operations on more bytes than this go on in the background from the start. Shorter ones have
/// sent all they can when they are submitted, and waking a thread for what is left would cost more
/// than it gains.
pub(crate) const OVERLAP_FROM: usize = 256 << 10;

/// A rank as callers give it. One that does not fit into 32 bits is outside every group, and is
/// refused as such.
pub(crate) fn rank(index: usize) -> Rank {
    Rank(u32::try_from(index).unwrap_or(u32::MAX))
}

pub(crate) fn unwrap<T: Element>(buffer: Buffer) -> Vec<T> {
    buffer.into_vec().expect("a result has the type of its call")
}

fn unwrap_some<T: Element>(buffer: Buffer) -> Option<Vec<T>> {
    Some(unwrap(buffer))
}

fn nothing<T: Element>(_: Buffer) -> Option<Vec<T>> {
    None
}

/// 64 bits that almost certainly differ if the data do (FNV-1a, eight bytes at a time).
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    let step =
        |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
    let (words, rest) = bytes.as_chunks::<8>();
    let hash = words
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, word| step(hash, u64::from_le_bytes(*word)));
    rest.iter().fold(hash, |hash, byte| step(hash, u64::from(*byte)))
}

//! Requests and responses: a rank registers handlers by name, any rank calls them.
//!
//! A group that uses calls has a second communicator for them. From every other rank, each rank
//! keeps a receive posted for requests (tag 0) and one for responses (tag 1). Both travel as
//! parcels, because only the sender knows their length. One thread per group deals them out. Each
//! handler runs on a thread of its own, so it may take its time and make calls itself.
//!
//! ```text
//! request   8 id   4 length of the name   name   body
//! response  8 id   1 whether it worked    body, or what went wrong
//! ```

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Wake;
use std::time::{Duration, Instant};

use farwire_proto::{Call, CommId, OpError, Options, Peer, Rank, Tag};

use crate::comm::unwrap;
use crate::completion::Completion;
use crate::error::Error;
use crate::memory::Buffer;
use crate::node::Node;

const REQUESTS: Tag = Tag(0);
const RESPONSES: Tag = Tag(1);

/// Bytes of the longest request or response.
const LONGEST: usize = 64 << 20;
/// Bytes that a parcel may have around its body.
const AROUND: usize = 1 << 16;
/// Bytes of the longest error message in a response; the rest is cut off.
const MAX_ERROR_LEN: usize = 1 << 16;
/// Requests to one rank that may be unanswered at once. Further ones wait in this process.
const UNANSWERED: usize = 16;
/// Handlers that may run at once. Further requests stay unread.
const RUNNING: usize = 64;

/// Longer than any job.
const FOREVER: Duration = Duration::from_secs(1 << 32);

pub(crate) type Handler = dyn Fn(usize, Vec<u8>) -> Result<Vec<u8>, String> + Send + Sync;

/// The calls of one group on one rank.
#[derive(Debug)]
pub(crate) struct Calls {
    shared: Arc<Shared>,
    news: Sender<News>,
}

/// What the dealing thread, the handlers' threads and the callers share.
struct Shared {
    node: Weak<Node>,
    comm: CommId,
    me: Rank,
    handlers: Mutex<HashMap<String, Arc<Handler>>>,
    /// Calls that wait for their response, by id.
    outstanding: Mutex<HashMap<u64, Outstanding>>,
    flow: Mutex<Flow>,
    next_id: AtomicU64,
}

/// Requests on their way. A rank that does not answer holds up only the requests to itself, which
/// wait here.
#[derive(Default)]
struct Flow {
    /// Requests sent and not yet answered, by receiver, even if their callers have given up.
    unanswered: HashMap<Rank, usize>,
    /// Requests that wait until others are answered.
    queued: HashMap<Rank, VecDeque<(u64, Vec<u8>)>>,
}

struct Outstanding {
    completion: Arc<Completion>,
    to: Rank,
    name: String,
    after: Duration,
    due: Instant,
}

/// Messages to the dealing thread.
#[derive(Debug)]
enum News {
    /// A posted receive has ended.
    Arrived(Rank, Tag),
    /// There is a deadline to watch.
    Called,
    /// A handler has ended.
    Handled,
    /// The group is gone.
    Quit,
}

impl Calls {
    /// Opens the communicator for calls and posts the first receives.
    ///
    /// Waiting requests are answered from now on, so the first handler, if there is one, must be
    /// there already.
    pub(crate) fn start(
        node: Weak<Node>,
        group: CommId,
        me: Rank,
        members: &[Peer],
        first: Option<(&str, Arc<Handler>)>,
    ) -> Result<Self, Error> {
        let comm = group.child(u32::MAX, u32::MAX);
        if let Some(node) = node.upgrade() {
            node.driver().open(comm, members)?;
        }
        let shared = Arc::new(Shared {
            node,
            comm,
            me,
            handlers: Mutex::new(
                first.map(|(name, handler)| (name.to_owned(), handler)).into_iter().collect(),
            ),
            outstanding: Mutex::default(),
            flow: Mutex::default(),
            next_id: AtomicU64::new(0),
        });
        let (news, heard) = mpsc::channel();
        let others: Vec<_> =
            (0..members.len() as u32).map(Rank).filter(|rank| *rank != me).collect();
        let mut dealer = Dealer {
            shared: shared.clone(),
            news: news.clone(),
            posted: HashMap::new(),
            running: 0,
            parked: VecDeque::new(),
        };
        on_a_thread("farwire-calls", move || dealer.deal(&heard, &others))?;
        Ok(Self { shared, news })
    }

    /// Drops all handlers, and everything they hold.
    pub(crate) fn clear(&self) {
        lock(&self.shared.handlers).clear();
    }

    pub(crate) fn register(&self, name: &str, handler: Arc<Handler>) {
        lock(&self.shared.handlers).insert(name.to_owned(), handler);
    }

    /// Sends a request. Its response will be left in `completion`.
    pub(crate) fn call(
        &self,
        to: Rank,
        name: &str,
        request: Vec<u8>,
        after: Duration,
        completion: &Arc<Completion>,
    ) -> Result<(), Error> {
        if request.len() > LONGEST || name.len() > AROUND / 2 {
            return Err(Error::TooLong {
                what: "request",
                len: request.len() + name.len(),
                limit: LONGEST,
            });
        }
        let now = Instant::now();
        let due = now.checked_add(after).unwrap_or(now + FOREVER);
        let id = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let call =
            Outstanding { completion: completion.clone(), to, name: name.to_owned(), after, due };
        lock(&self.shared.outstanding).insert(id, call);
        let _ = self.news.send(News::Called);
        let sent = if to == self.shared.me {
            let (shared, name) = (self.shared.clone(), name.to_owned());
            on_a_thread("farwire-handler", move || {
                shared.answered(id, shared.handle(to, &name, request))
            })
        } else {
            let name_len = (name.len() as u32).to_le_bytes();
            let parcel = [&id.to_le_bytes()[..], &name_len, name.as_bytes(), &request].concat();
            self.shared.request(to, id, parcel)
        };
        if sent.is_err() {
            lock(&self.shared.outstanding).remove(&id);
        }
        sent
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        let _ = self.news.send(News::Quit);
        if let Some(node) = self.shared.node.upgrade() {
            node.driver().close_comm(self.shared.comm);
        }
    }
}

impl Shared {
    fn send(&self, to: Rank, tag: Tag, parcel: Vec<u8>) -> Result<(), Error> {
        let Some(node) = self.node.upgrade() else { return Ok(()) };
        let call = Call::SendParcel { to, tag, len: parcel.len() };
        let sent = node.driver().send_parcel(self.comm, &call, parcel, Arc::default());
        node.call_keeper();
        sent
    }

    /// Sends a request, now or when fewer are unanswered.
    fn request(&self, to: Rank, id: u64, parcel: Vec<u8>) -> Result<(), Error> {
        {
            let mut flow = lock(&self.flow);
            let unanswered = flow.unanswered.entry(to).or_insert(0);
            if *unanswered >= UNANSWERED {
                flow.queued.entry(to).or_default().push_back((id, parcel));
                return Ok(());
            }
            *unanswered += 1;
        }
        self.send(to, REQUESTS, parcel)
    }

    /// A rank has answered a request: sends it the next one whose caller still waits.
    fn next_request(&self, to: Rank) {
        let next = {
            let mut flow = lock(&self.flow);
            let unanswered = flow.unanswered.entry(to).or_insert(0);
            *unanswered = unanswered.saturating_sub(1);
            let queued = flow.queued.entry(to).or_default();
            std::iter::from_fn(|| queued.pop_front())
                .find(|(id, _)| lock(&self.outstanding).contains_key(id))
        };
        if let Some((id, parcel)) = next {
            // If it cannot be sent, the group has failed, and its caller is told along with all
            // others.
            let _ = self.request(to, id, parcel);
        }
    }

    /// A handler's answer to a request.
    fn handle(&self, from: Rank, name: &str, request: Vec<u8>) -> Result<Vec<u8>, String> {
        let handler = lock(&self.handlers).get(name).cloned();
        let Some(handler) = handler else {
            let names = lock(&self.handlers).keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(format!("nobody has registered `{name}` there; registered: {names}"));
        };
        let answer = catch_unwind(AssertUnwindSafe(|| handler(from.index(), request)))
            .unwrap_or_else(|_| Err("its handler panicked".to_owned()))?;
        if answer.len() > LONGEST {
            return Err(format!("its answer has {} bytes, more than {LONGEST}", answer.len()));
        }
        Ok(answer)
    }

    /// Completes a call with its response. If the caller has given up, the response is dropped.
    fn answered(&self, id: u64, answer: Result<Vec<u8>, String>) {
        let Some(Outstanding { completion, to, name, .. }) = lock(&self.outstanding).remove(&id)
        else {
            return;
        };
        let result = answer.map(Buffer::from);
        self.complete(
            &completion,
            result.map_err(|message| Error::Remote { rank: to.index(), name, message }),
        );
    }

    /// Ends the calls whose deadline has passed, and says when the next is due.
    fn give_up_late(&self) -> Option<Instant> {
        let now = Instant::now();
        let late: Vec<_> = lock(&self.outstanding).extract_if(|_, call| call.due <= now).collect();
        for (_, Outstanding { completion, to, name, after, .. }) in late {
            self.complete(&completion, Err(Error::Unanswered { rank: to.index(), name, after }));
        }
        lock(&self.outstanding).values().map(|call| call.due).min()
    }

    /// The group has failed: no response will come.
    fn fail_all(&self, error: &OpError) {
        let all: Vec<_> = lock(&self.outstanding).drain().collect();
        for (_, Outstanding { completion, .. }) in all {
            self.complete(
                &completion,
                Err(Error::Failed { error: Box::new(*error), members: None, input: None }),
            );
        }
    }

    fn complete(&self, completion: &Completion, result: Result<Buffer, Error>) {
        if let Some(waker) = completion.complete(result) {
            waker.wake();
        }
        if let Some(node) = self.node.upgrade() {
            node.nudge();
        }
    }
}

/// The thread that deals requests out to handlers, and responses to callers.
struct Dealer {
    shared: Arc<Shared>,
    news: Sender<News>,
    /// Receives that are posted.
    posted: HashMap<(Rank, Tag), Arc<Completion>>,
    /// Handlers that are running.
    running: usize,
    /// Ranks whose next request has to wait until a handler ends.
    parked: VecDeque<Rank>,
}

impl Dealer {
    fn deal(&mut self, heard: &Receiver<News>, others: &[Rank]) {
        for (rank, tag) in others.iter().flat_map(|rank| [(*rank, REQUESTS), (*rank, RESPONSES)]) {
            self.post(rank, tag);
        }
        loop {
            let due = self.shared.give_up_late();
            let patience = due.map_or(FOREVER, |due| due.saturating_duration_since(Instant::now()));
            match heard.recv_timeout(patience) {
                Ok(News::Arrived(from, tag)) => self.arrived(from, tag),
                Ok(News::Called) | Err(RecvTimeoutError::Timeout) => {}
                Ok(News::Handled) => {
                    self.running -= 1;
                    if let Some(from) = self.parked.pop_front() {
                        self.post(from, REQUESTS);
                    }
                }
                Ok(News::Quit) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Posts a receive for the next request or response from a rank.
    fn post(&mut self, from: Rank, tag: Tag) {
        let Some(node) = self.shared.node.upgrade() else { return };
        let completion = Arc::new(Completion::default());
        let call = Call::RecvParcel { from, tag, max: LONGEST + AROUND };
        let options = Options { deadline: Some(Duration::MAX), ..Options::default() };
        // This fails once the rank is lost; then there is nothing to wait for.
        if node.driver().recv_parcel(self.shared.comm, &call, &options, completion.clone()).is_ok()
        {
            completion.wake(Arc::new(Doorbell { news: self.news.clone(), from, tag }).into());
            self.posted.insert((from, tag), completion);
            node.call_keeper();
        }
    }

    fn arrived(&mut self, from: Rank, tag: Tag) {
        let parcel = match self.posted.remove(&(from, tag)).and_then(|completion| completion.take())
        {
            Some(Ok(parcel)) => unwrap(parcel),
            // Nobody of this group will answer any more.
            Some(Err(Error::Failed { error, .. })) => return self.shared.fail_all(&error),
            _ => return,
        };
        let understood =
            if tag == REQUESTS { self.request(from, parcel) } else { self.response(from, &parcel) };
        if understood.is_none() {
            tracing::warn!(rank = from.0, "ignoring a call that makes no sense");
        }
        if tag == REQUESTS && self.running >= RUNNING {
            self.parked.push_back(from);
        } else {
            self.post(from, tag);
        }
    }

    fn request(&mut self, from: Rank, mut parcel: Vec<u8>) -> Option<()> {
        let (id, rest) = parcel.split_first_chunk()?;
        let (name_len, rest) = rest.split_first_chunk()?;
        let (id, name_len) = (u64::from_le_bytes(*id), u32::from_le_bytes(*name_len) as usize);
        let name = std::str::from_utf8(rest.get(..name_len)?).ok()?.to_owned();
        parcel.drain(..12 + name_len);
        let (shared, news) = (self.shared.clone(), self.news.clone());
        let started = on_a_thread("farwire-handler", move || {
            let answer = shared.handle(from, &name, parcel);
            let (worked, mut body) =
                answer.map_or_else(|why| (0, why.into_bytes()), |body| (1, body));
            body.truncate(if worked == 0 { MAX_ERROR_LEN } else { LONGEST });
            // If it cannot be sent, the caller finds out by itself.
            let _ =
                shared.send(from, RESPONSES, [&id.to_le_bytes()[..], &[worked], &body].concat());
            let _ = news.send(News::Handled);
        });
        match started {
            Ok(()) => self.running += 1,
            Err(error) => {
                let why = [&id.to_le_bytes()[..], &[0], error.to_string().as_bytes()].concat();
                let _ = self.shared.send(from, RESPONSES, why);
            }
        }
        Some(())
    }

    fn response(&self, from: Rank, parcel: &[u8]) -> Option<()> {
        self.shared.next_request(from);
        let (id, rest) = parcel.split_first_chunk()?;
        let (worked, body) = rest.split_first()?;
        let failure = || Err(String::from_utf8_lossy(body).into_owned());
        self.shared.answered(
            u64::from_le_bytes(*id),
            if *worked == 1 { Ok(body.to_vec()) } else { failure() },
        );
        Some(())
    }
}

/// Rung when a posted receive has ended.
struct Doorbell {
    news: Sender<News>,
    from: Rank,
    tag: Tag,
}

impl Wake for Doorbell {
    fn wake(self: Arc<Self>) {
        let _ = self.news.send(News::Arrived(self.from, self.tag));
    }
}

fn on_a_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    started.map(drop).map_err(|error| Error::System { what: "could not start a thread", error })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("comm", &self.comm)
            .field("me", &self.me)
            .finish_non_exhaustive()
    }
}

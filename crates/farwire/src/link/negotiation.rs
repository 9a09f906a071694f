//! How two processes agree on a link.
//!
//! 1. Each tells the other which kinds of link it can use for this pair, those that suit it first.
//! 2. Both try the first kind on the lower rank's list that both can use. While they do, they may
//!    exchange messages that only this kind understands.
//! 3. Each tells the other whether it has succeeded. If both have, that link is used; otherwise
//!    they try the next kind.
//!
//! All of it goes over a [`Control`] channel, so it does not matter how the two met.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Boxed, Link, LinkKind, Pair};
use crate::join::rendezvous::JoinError;
use crate::quic::control::Health;

/// Messages to and from one peer that has proven who it is, each way in order.
pub(crate) trait Control: Send {
    fn send<'a>(&'a mut self, message: &'a [u8]) -> Boxed<'a, Result<(), String>>;
    fn recv(&mut self) -> Boxed<'_, Result<Vec<u8>, String>>;
}

/// What the two sides tell each other.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// The kinds of link that this side can use, the best first; and the same in words.
    Kinds { names: Vec<String>, words: String },
    /// A message for the kind that is being tried.
    Said(serde_json::Value),
    /// How the attempt went for this side.
    Done(Result<(), String>),
}

/// What two processes have agreed on.
#[derive(Debug)]
pub(crate) struct Linked {
    pub(crate) kind: &'static dyn LinkKind,
    pub(crate) link: Box<dyn Link>,
    pub(crate) health: Arc<Health>,
}

/// Calls [`LinkKind::prepare`] for every kind that may be used.
pub(crate) fn prepare<'a>(
    kinds: impl Iterator<Item = &'static dyn LinkKind>,
    pairs: impl Iterator<Item = &'a Pair> + Clone,
) -> Result<(), JoinError> {
    for kind in kinds {
        let peers = pairs.clone().filter(|pair| kind.serves(pair).is_ok()).count();
        kind.prepare(peers).map_err(JoinError::Link)?;
    }
    Ok(())
}

/// Agrees with the peer on a link, and sets it up.
pub(crate) async fn agree(
    pair: &Pair,
    kinds: impl Iterator<Item = &'static dyn LinkKind>,
    control: &mut dyn Control,
) -> Result<Linked, JoinError> {
    let lost = |reason| JoinError::Lost { peer: pair.peer, reason };
    let mut talk = Negotiation { control, theirs: None };
    let (mut usable, mut why_not, mut failed) = (Vec::new(), Vec::new(), String::new());
    for kind in kinds {
        match kind.serves(pair) {
            Ok(()) => usable.push(kind),
            Err(why) => why_not.push(format!("not {}: {why}", kind.name())),
        }
    }
    usable.sort_by_key(|kind| !kind.suits(pair));
    let names: Vec<_> = usable.iter().map(|kind| kind.name().to_owned()).collect();
    let mine = names.iter().chain(&why_not).map(String::as_str).collect::<Vec<_>>().join(", ");
    talk.tell(&Message::Kinds { names: names.clone(), words: mine.clone() }).await.map_err(lost)?;
    let Message::Kinds { names: their_names, words: theirs } = talk.next().await.map_err(lost)?
    else {
        return Err(lost(NONSENSE.to_owned()));
    };
    let (lower, higher) =
        if pair.me < pair.peer { (names, their_names) } else { (their_names, names) };
    for name in lower.iter().filter(|name| higher.contains(name)) {
        let Some(kind) = usable.iter().copied().find(|kind| kind.name() == name) else { continue };
        // Each attempt has its own health, which the remains of a failed attempt cannot touch.
        let health = Health::new(pair.bell.clone());
        let attempt = kind.connect(pair, health.clone(), &mut talk).await;
        match talk.conclude(attempt).await.map_err(lost)? {
            Ok(link) => {
                let (me, peer, why) = (pair.me, pair.peer, why_not.join("; ") + &failed);
                if !why.is_empty() {
                    tracing::info!(%me, %peer, why, "using {name}");
                }
                return Ok(Linked { kind, link, health });
            }
            Err(why) => failed += &format!("; {name} failed: {why}"),
        }
    }
    let Pair { me, peer, .. } = pair;
    Err(JoinError::Link(format!(
        "{me} and {peer} found no link that serves both: {me} can use [{mine}], {peer} [{theirs}]\
         {failed}; set FARWIRE_LINK to auto, or on all ranks to the same link"
    )))
}

const NONSENSE: &str = "it answered something unexpected while a link was set up";

/// A conversation with the peer while one kind of link is set up.
pub(crate) struct Negotiation<'a> {
    control: &'a mut dyn Control,
    /// How the attempt went for the peer, if it has said so.
    theirs: Option<Result<(), String>>,
}

impl Negotiation<'_> {
    /// Tells the peer's end of this kind something.
    pub(crate) async fn say(&mut self, message: &impl Serialize) -> Result<(), String> {
        let message = serde_json::to_value(message).map_err(|error| error.to_string())?;
        self.tell(&Message::Said(message)).await
    }

    /// What the peer's end of this kind says next; an error if it has given up.
    pub(crate) async fn hear<T: DeserializeOwned>(&mut self) -> Result<T, String> {
        if self.theirs.is_none() {
            match self.next().await? {
                Message::Said(message) => {
                    return serde_json::from_value(message).map_err(|error| error.to_string());
                }
                Message::Done(theirs) => self.theirs = Some(theirs),
                Message::Kinds { .. } => {}
            }
        }
        Err(self.theirs.clone().and_then(Result::err).unwrap_or_else(|| NONSENSE.to_owned()))
    }

    /// The link, if both sides have succeeded; else why not.
    async fn conclude(
        &mut self,
        attempt: Result<Box<dyn Link>, String>,
    ) -> Result<Result<Box<dyn Link>, String>, String> {
        self.tell(&Message::Done(attempt.as_ref().map(|_| ()).map_err(Clone::clone))).await?;
        let theirs = loop {
            match self.theirs.take() {
                Some(theirs) => break theirs,
                None => match self.next().await? {
                    Message::Done(theirs) => self.theirs = Some(theirs),
                    Message::Said(_) => {} // this side gave up before it was said
                    Message::Kinds { .. } => return Err(NONSENSE.to_owned()),
                },
            }
        };
        Ok(theirs.and(attempt))
    }

    async fn tell(&mut self, message: &Message) -> Result<(), String> {
        let message = serde_json::to_vec(message).map_err(|error| error.to_string())?;
        self.control.send(&message).await
    }

    async fn next(&mut self) -> Result<Message, String> {
        let message = self.control.recv().await?;
        serde_json::from_slice(&message).map_err(|error| format!("{NONSENSE}: {error}"))
    }
}

/// Reads any bytes as a message from the other side. Fuzzing checks that no bytes make this panic.
pub(crate) fn read_anything(bytes: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<Message>(bytes) {
        serde_json::to_vec(&message).expect("what was read can be written");
    }
}

#[cfg(test)]
mod tests {
    use farwire_proto::Peer;
    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

    use super::*;
    use crate::link::Wanted;
    use crate::shm::bell::Bell;
    use crate::shm::link::SharedLink;
    use crate::shm::ring;

    const PAYLOAD: usize = 1000;

    struct Channel(UnboundedSender<Vec<u8>>, UnboundedReceiver<Vec<u8>>);

    impl Control for Channel {
        fn send<'a>(&'a mut self, message: &'a [u8]) -> Boxed<'a, Result<(), String>> {
            let sent = self.0.send(message.to_vec()).map_err(|error| error.to_string());
            Box::pin(std::future::ready(sent))
        }

        fn recv(&mut self) -> Boxed<'_, Result<Vec<u8>, String>> {
            Box::pin(async { self.1.recv().await.ok_or_else(|| "gone".to_owned()) })
        }
    }

    /// A kind of link that one rank cannot use, or that fails for one rank: before it says
    /// anything, or after it has heard the peer.
    #[derive(Debug)]
    struct Test {
        name: &'static str,
        excluded: Option<u32>,
        suits: bool,
        fails_at_once: Option<u32>,
        fails_later: Option<u32>,
    }

    const WORKS: Test =
        Test { name: "b", excluded: None, suits: true, fails_at_once: None, fails_later: None };

    impl LinkKind for Test {
        fn name(&self) -> &'static str {
            self.name
        }

        fn about(&self) -> &'static str {
            "A test"
        }

        fn serves(&self, pair: &Pair) -> Result<(), String> {
            if self.excluded == Some(pair.me.0) { Err("out of luck".to_owned()) } else { Ok(()) }
        }

        fn suits(&self, _: &Pair) -> bool {
            self.suits
        }

        fn connect<'a>(
            &'a self,
            pair: &'a Pair,
            health: Arc<Health>,
            talk: &'a mut Negotiation<'_>,
        ) -> Boxed<'a, Result<Box<dyn Link>, String>> {
            Box::pin(async move {
                if self.fails_at_once == Some(pair.me.0) {
                    return Err("no memory".to_owned());
                }
                talk.say(&(self.name, pair.me.0)).await?;
                assert_eq!(
                    talk.hear::<(String, u32)>().await?,
                    (self.name.to_owned(), pair.peer.0)
                );
                if self.fails_later == Some(pair.me.0) {
                    return Err("no files".to_owned());
                }
                let region = ring::region(PAYLOAD).unwrap().close_file();
                let (sender, receiver) = ring::pair(region, PAYLOAD, pair.peer);
                let link = SharedLink::new(sender, receiver, pair.bell.clone(), Some(health));
                Ok(Box::new(link) as Box<dyn Link>)
            })
        }
    }

    /// What ranks 0 and 1 agree on, or their errors, if each may use these kinds.
    fn agreed(kinds: [&'static [Test]; 2]) -> [Result<&'static str, String>; 2] {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let ((to_1, from_0), (to_0, from_1)) = (unbounded_channel(), unbounded_channel());
        let side = async |me: u32, mut control: Channel| {
            let bell = Bell::new().unwrap();
            let (me, peer, same_host) = (Peer(me), Peer(1 - me), true);
            let connections = Wanted::ONE;
            let pair = Pair { me, peer, same_host, payload: PAYLOAD, bell, connections, met: None };
            let kinds = kinds[me.index()].iter().map(|kind| kind as &dyn LinkKind);
            let linked = agree(&pair, kinds, &mut control).await;
            // The other side may still have to read what was said last.
            (linked.map(|linked| linked.kind.name()).map_err(|error| error.to_string()), control)
        };
        runtime.block_on(async {
            let sides =
                tokio::join!(side(0, Channel(to_1, from_1)), side(1, Channel(to_0, from_0)));
            [sides.0.0, sides.1.0]
        })
    }

    #[test]
    fn the_first_kind_that_works_for_both_is_used() {
        const A: Test = Test { name: "a", ..WORKS };
        for a in [0, 1].map(Some) {
            let worse: [&'static [Test]; 3] = [
                Box::leak(Box::new([Test { excluded: a, ..A }, WORKS])),
                Box::leak(Box::new([Test { fails_at_once: a, ..A }, WORKS])),
                Box::leak(Box::new([Test { fails_later: a, ..A }, WORKS])),
            ];
            for kinds in worse {
                assert_eq!(agreed([kinds; 2]), [Ok("b"), Ok("b")], "{kinds:?}");
            }
        }
        assert_eq!(agreed([&[A, WORKS]; 2]), [Ok("a"), Ok("a")]);
        // Builds may list kinds in another order, or have others.
        assert_eq!(agreed([&[A, WORKS], &[WORKS, A]]), [Ok("a"), Ok("a")]);
        assert_eq!(agreed([&[WORKS, A], &[Test { name: "c", ..WORKS }, A]]), [Ok("a"), Ok("a")]);
    }

    #[test]
    fn a_kind_that_does_not_suit_the_pair_is_used_if_no_other_serves_it() {
        const LAST: Test = Test { name: "a", suits: false, ..WORKS };
        assert_eq!(agreed([&[LAST, WORKS]; 2]), [Ok("b"), Ok("b")]);
        assert_eq!(agreed([&[LAST, WORKS], &[LAST]]), [Ok("a"), Ok("a")]);
        // The two may see it differently: the lower rank's view counts.
        const FIRST: Test = Test { name: "a", ..WORKS };
        assert_eq!(agreed([&[FIRST, WORKS], &[LAST, WORKS]]), [Ok("a"), Ok("a")]);
        assert_eq!(agreed([&[LAST, WORKS], &[FIRST, WORKS]]), [Ok("b"), Ok("b")]);
    }

    #[test]
    fn without_a_common_link_both_sides_say_what_each_could_use() {
        const A: Test = Test { name: "a", ..WORKS };
        for error in agreed([&[A], &[WORKS]]).map(Result::unwrap_err) {
            assert!(
                error.contains("rank 0 can use [a]") || error.contains("rank 0 [a]"),
                "{error}"
            );
            assert!(
                error.contains("rank 1 can use [b]") || error.contains("rank 1 [b]"),
                "{error}"
            );
            assert!(error.contains("FARWIRE_LINK"), "{error}");
        }
        for error in agreed([&[Test { excluded: Some(1), ..A }]; 2]).map(Result::unwrap_err) {
            assert!(error.contains("not a: out of luck"), "{error}");
        }
        for error in agreed([&[Test { fails_later: Some(0), ..A }]; 2]).map(Result::unwrap_err) {
            assert!(error.contains("a failed: no files"), "{error}");
        }
    }
}

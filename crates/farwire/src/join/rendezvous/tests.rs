use farwire_proto::WorldSize;

use super::*;
use crate::token::Token;

fn hello(job: &str, rank: u32, version: u8) -> Hello {
    let member = Member { rank, host: "h".to_owned(), cores: 1 };
    Hello {
        version,
        job: JobName::new(job).unwrap(),
        agree_on: "steps 3\ncodec dense".to_owned(),
        agree_later: None,
        world: 4,
        epoch: 0,
        process: 7,
        purpose: Purpose::Start,
        member,
    }
}

/// Rank 1 of the job "here", which listens.
struct Listening {
    token: Token,
    address: SocketAddr,
    expected: Arc<Expected>,
    _newcomers: mpsc::Receiver<Newcomer>,
}

impl Listening {
    async fn new() -> Self {
        let token = Token::generate();
        let place = Place {
            rank: Peer(1),
            world: WorldSize::new(4).unwrap(),
            master_host: String::new(),
            master_port: 1,
            job: None,
            source: "the test",
        };
        let job = JobName::new("here").unwrap();
        let tcp = TcpSettings::default();
        let terms = Terms {
            place: &place,
            job: &job,
            host: "here",
            agree_on: "",
            agree_later: &Later::default(),
            epoch: Epoch(0),
            master: SocketAddr::from(([127, 0, 0, 1], 1)),
            port_is_held: false,
            beginning: None,
            tcp: Some(&tcp),
            port: 0,
            interface: None,
            timeout: Duration::from_secs(60),
            lobby: None,
        };
        let identity = Arc::new(Identity::new(&token, Peer(1), Epoch(0), &job).unwrap());
        let Ears { endpoint, server, tcp, .. } = listen(&terms, &identity).await.unwrap();
        let address = endpoint.local_addr().unwrap();
        let (door, newcomers) = mpsc::channel(100);
        let expected = Arc::new(Expected::default());
        let listener = Listener {
            identity,
            hello: hello("here", 1, VERSION),
            refusals: Arc::default(),
            expected: expected.clone(),
            door,
            side_door: mpsc::channel(1).0,
            lobby: None,
            agree_later: Later::default(),
        };
        listener.keep(endpoint, server, Transport::default(), tcp.tunnels().clone());
        Self { token, address, expected, _newcomers: newcomers }
    }

    /// A caller that says this hello, and has the certificate of its job and rank.
    fn caller(&self, hello: &Hello, patience: Duration) -> Caller {
        let rank = Peer(hello.member.rank);
        let identity = Identity::new(&self.token, rank, Epoch(0), &hello.job).unwrap();
        let identity = Arc::new(identity);
        let deaf = Err("only QUIC".to_owned());
        let (local, settings) = (Ipv4Addr::LOCALHOST.into(), TcpSettings::default());
        Caller {
            tcp: TcpPort::open(deaf, local, identity.clone(), settings, Arc::default()).unwrap(),
            endpoint: Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap(),
            client: identity.client_config().unwrap(),
            transport: Transport::default(),
            identity,
            hello: hello.clone(),
            deadline: Instant::now() + patience,
            patience,
        }
    }
}

const LONG: Duration = Duration::from_secs(60);

/// The answers to these hellos.
async fn answers(hellos: &[Hello]) -> Vec<Result<(), String>> {
    let listening = Listening::new().await;
    let mut answers = Vec::new();
    for hello in hellos {
        let heard = listening.caller(hello, LONG).connect(Peer(1), listening.address).await;
        answers.push(heard.map(|_| ()).map_err(|error| error.to_string()));
    }
    answers
}

#[tokio::test]
async fn a_further_connection_is_for_the_rank_that_has_the_ticket() {
    let listening = Listening::new().await;
    let again = |job: &str, rank: u32, patience: Duration| {
        let caller = listening.caller(&hello(job, rank, VERSION), patience);
        Again::new(Arc::new(caller), listening.expected.clone())
    };
    let rank_2 = listening.caller(&hello("here", 2, VERSION), LONG);
    let first = rank_2.connect(Peer(1), listening.address).await.unwrap().connection;
    let (ticket, met_again) = again("here", 1, LONG).expect(Peer(2)).unwrap();

    let short = Duration::from_millis(500);
    for (wrong, job, rank) in
        [(ticket.wrapping_add(1), "here", 2), (ticket, "here", 3), (u64::MAX, "elsewhere", 2)]
    {
        let refused = again(job, rank, short).call(&first, Peer(1), wrong).await.unwrap_err();
        assert!(refused.contains("its ticket is not of this process"), "{refused}");
    }
    let called = again("here", 2, LONG);
    let (second, met_again) = tokio::join!(called.call(&first, Peer(1), ticket), met_again);
    let mut stream = second.unwrap().open_bi().await.unwrap().0;
    stream.write_all(b"hello again").await.unwrap();
    stream.finish().unwrap();
    let mut stream = met_again.unwrap().accept_bi().await.unwrap().1;
    assert_eq!(stream.read_to_end(100).await.unwrap(), b"hello again");

    let used = again("here", 2, short).call(&first, Peer(1), ticket).await.unwrap_err();
    assert!(used.contains("its ticket is not of this process"), "it was used: {used}");
    let nobody = again("here", 1, short).expect(Peer(2)).unwrap().1.await.unwrap_err();
    assert_eq!(nobody, "rank 2 did not connect again");
}

/// What becomes known later counts once both sides know it.
#[test]
fn those_that_join_are_asked_for_what_is_known_by_then() {
    let knows = |line: &str| Hello {
        agree_later: Some(line.to_owned()).filter(|line| !line.is_empty()),
        ..hello("here", 2, VERSION)
    };
    let judged = |theirs: &str, ours: &str| disagreement(&knows(theirs), &knows(ours), "it");
    assert!(
        judged("data a", "data b").unwrap().contains("it has \"data a\", rank 2 has \"data b\"")
    );
    for (theirs, ours) in [("data a", "data a"), ("data a", ""), ("", "data a")] {
        assert_eq!(judged(theirs, ours), None);
    }
}

/// Not only rank 0 looks at who comes: so does every rank that others connect to.
#[tokio::test]
async fn every_rank_refuses_strangers_and_says_why() {
    let large = Hello { world: 5, ..hello("here", 2, VERSION) };
    let older = Hello { epoch: 1, ..hello("here", 2, VERSION) };
    let other = "steps 3\ncodec topk:0.01".to_owned();
    let other = Hello { agree_on: other, ..hello("here", 2, VERSION) };
    let less = Hello { agree_on: "steps 3".to_owned(), ..hello("here", 2, VERSION) };
    let mut long = hello("here", 2, VERSION);
    long.member.host = "h".repeat(65);
    let cases = [
        (
            hello("elsewhere", 2, VERSION),
            "rank 2 belongs to job \"elsewhere\", rank 1 to job \"here\"",
        ),
        (hello("here", 2, VERSION + 1), "run the same farwire on all"),
        (large, "started for 5 ranks, rank 1 for 4"),
        (hello("here", 4, VERSION), "rank 4 is not below the world size"),
        (older, "generation"),
        (other, "rank 2 has \"codec topk:0.01\", rank 1 has \"codec dense\""),
        (less, "rank 2 has nothing, rank 1 has \"codec dense\""),
        (long, "too long"),
    ];
    let (hellos, says): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    for (answer, says) in answers(&hellos).await.into_iter().zip(says) {
        let error = answer.unwrap_err();
        assert!(error.contains("rank 1 refused rank") && error.contains(says), "{error}");
    }
    assert_eq!(answers(&[hello("here", 2, VERSION)]).await, [Ok(())]);
}

/// Otherwise a large job could not be joined.
#[test]
fn every_entry_of_the_table_of_ranks_fits() {
    let host = "\u{1}".repeat(MAX_HOST); // which JSON writes with six bytes each
    let member = Member { rank: u32::MAX, host, cores: u32::MAX };
    let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff%4294967295]:65535".parse().unwrap();
    let table =
        |ranks| encode(&Answer::Welcome(vec![(member.clone(), Some(address)); ranks])).unwrap();
    assert!(table(2).len() - table(1).len() <= MAX_ENTRY);
}

/// A name that is only claimed is not enough.
#[tokio::test]
async fn a_certificate_of_another_job_is_not_of_this_one() {
    let token = Token::generate();
    let of =
        |job: &str| Identity::new(&token, Peer(1), Epoch(0), &JobName::new(job).unwrap()).unwrap();
    let server =
        Endpoint::server(of("a").server_config().unwrap(), ([127, 0, 0, 1], 0).into()).unwrap();
    let address = server.local_addr().unwrap();
    let accepted = tokio::spawn(async move { server.accept().await.unwrap().await.unwrap() });
    let mut client = Endpoint::client(([127, 0, 0, 1], 0).into()).unwrap();
    client.set_default_client_config(of("b").client_config().unwrap());
    let here = client.connect(address, &of("b").name_of(Peer(1))).unwrap().await.unwrap();
    let there = accepted.await.unwrap();
    for (connection, job) in [(&here, "a"), (&there, "b")] {
        assert!(of("c").is_certified(connection, Peer(1)));
        assert!(!of("c").is_certified(connection, Peer(2)));
        assert!(of(job).is_of_this_job(connection, Peer(1)));
        assert!(!of(job).is_of_this_job(connection, Peer(2)));
        assert!(!of("c").is_of_this_job(connection, Peer(1)));
    }
}

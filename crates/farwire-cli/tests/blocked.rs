//! Two hosts, as network namespaces, between which a firewall drops UDP, or TCP: ranks use the
//! other.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::process::{Child, Command, Stdio};

/// Two hosts and the cable between them, for as long as it lives.
struct Hosts {
    names: [String; 2],
}

fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program).args(arguments.split(' ')).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

impl Hosts {
    fn new() -> Result<Hosts, String> {
        let names = [0, 1].map(|host| format!("fwb{}h{host}", std::process::id()));
        let hosts = Hosts { names };
        let [zero, one] = &hosts.names;
        run("ip", &format!("netns add {zero}"))?;
        run("ip", &format!("netns add {one}"))?;
        run("ip", &format!("link add eth0 netns {zero} type veth peer name eth0 netns {one}"))?;
        for (host, name) in hosts.names.iter().enumerate() {
            run("ip", &format!("-n {name} addr add 10.79.0.{}/24 dev eth0", host + 1))?;
            run("ip", &format!("-n {name} link set eth0 up"))?;
            run("ip", &format!("-n {name} link set lo up"))?;
        }
        Ok(hosts)
    }

    /// Drops what comes to either host by one protocol, and nothing else any more. Traffic within a
    /// host is not affected.
    fn block(&self, protocol: &str) -> Result<(), String> {
        for name in &self.names {
            let nft = |rule: &str| run("ip", &format!("netns exec {name} nft {rule}"));
            nft("flush ruleset")?;
            nft("add table inet wall")?;
            nft("add chain inet wall in { type filter hook input priority 0 ; }")?;
            nft(&format!("add rule inet wall in iifname eth0 meta l4proto {protocol} drop"))?;
        }
        Ok(())
    }

    /// Starts two ranks on a host, which reduce and check.
    fn launch(&self, host: usize, token: &str) -> Child {
        let exe = env!("CARGO_BIN_EXE_farwire");
        let bench = ["bench", "all_reduce", "--size", "100KiB", "--iters", "5", "--check"];
        Command::new("timeout")
            .args(["120", "ip", "netns", "exec", &self.names[host], exe, "launch", "-n", "2"])
            .args(["--nnodes", "2", "--node-rank", &host.to_string()])
            .args(["--master", "10.79.0.1:29500", "--", exe])
            .args(bench)
            .env("FARWIRE_TOKEN", token)
            .env_remove("FARWIRE_LINK")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = run("ip", &format!("netns del {name}"));
        }
    }
}

/// What both hosts' launchers said; the table is rank 0's.
fn said(hosts: &Hosts) -> [String; 2] {
    let token = farwire::Token::generate().reveal();
    let launchers = [0, 1].map(|host| hosts.launch(host, &token));
    launchers.map(|launcher| {
        let output = launcher.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        text
    })
}

#[test]
fn hosts_with_udp_or_tcp_blocked_use_the_other() {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(reason) => {
            return println!("skipped, because there can be no network namespaces here: {reason}");
        }
    };
    const NOTICE: &str = "joining over TCP";
    let open = said(&hosts);
    // Neighbours have TCP, unless the machine is so busy that they seem far apart.
    let between = ["tcp (4 pairs)", "quic (4 pairs)"];
    assert!(between.iter().any(|link| open[0].contains(link)), "{}", open[0]);
    assert!(open.iter().all(|said| !said.contains(NOTICE)), "{open:?}");

    if let Err(reason) = hosts.block("tcp") {
        return println!("skipped, because there can be no firewall here: {reason}");
    }
    let blocked = said(&hosts);
    assert!(blocked[0].contains("shm (2 pairs), quic (4 pairs)"), "{}", blocked[0]);
    assert!(blocked.iter().all(|said| !said.contains(NOTICE)), "{blocked:?}");

    hosts.block("udp").unwrap();
    let blocked = said(&hosts);
    println!("{}\n{}", blocked[0], blocked[1]);
    assert!(blocked[0].contains("shm (2 pairs), tcp (4 pairs)"), "{}", blocked[0]);
    // Each rank that had to call says so once.
    for rank in ["[2]", "[3]"] {
        let says = |line: &&str| line.starts_with(rank) && line.contains(NOTICE);
        assert_eq!(blocked[1].lines().filter(says).count(), 1, "{}", blocked[1]);
    }
}

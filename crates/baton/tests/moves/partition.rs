//! Links that are cut without a word, between network namespaces.

use std::{
    fs::{self, File},
    os::fd::AsRawFd,
    process::Command,
};

use crate::{
    client::{Answer, Ask},
    common::{Server, baton, signal, wait_for_stop},
    fleet::{Fleet, Make, Ordered, until_empty},
};

const SOURCE: usize = 0;
const TARGET: usize = 1;
const TOKENS: u32 = 600;

/// Two replicas, each in a namespace of its own: a link from each to the gateway's namespace, and one between them for KV.
struct Net {
    namespaces: [String; 2],
    /// Their addresses.
    addresses: [String; 2],
}

impl Net {
    /// `None`, and says so, where this process may not make namespaces. `number` tells the nets of a process apart.
    fn new(number: u32) -> Option<Self> {
        let (pid, subnet) = (std::process::id(), 2 * number);
        let namespaces = [0, 1].map(|index| format!("baton-{pid}-{number}-{index}"));
        if !ip(&["netns", "add", &namespaces[0]]) {
            eprintln!("skipped: no network namespaces can be made here (it takes iproute2 and CAP_SYS_ADMIN)");
            return None;
        }
        let net = Self { addresses: [0, 1].map(|index| format!("10.213.{}.2", subnet + index)), namespaces };
        assert!(ip(&["netns", "add", &net.namespaces[1]]));
        for index in [0, 1] {
            let (space, outside) = (&net.namespaces[index], net.control_link(index));
            net.within(index, &["link", "set", "lo", "up"]);
            assert!(ip(&["link", "add", &outside, "type", "veth", "peer", "name", "control", "netns", space]));
            assert!(ip(&["address", "add", &format!("10.213.{}.1/24", subnet + index as u32), "dev", &outside]));
            assert!(ip(&["link", "set", &outside, "up"]));
            net.within(index, &["address", "add", &format!("{}/24", net.addresses[index]), "dev", "control"]);
            net.within(index, &["link", "set", "control", "up"]);
        }
        net.within(0, &["link", "add", "kv", "type", "veth", "peer", "name", "kv", "netns", &net.namespaces[1]]);
        for index in [0, 1] {
            net.within(index, &["address", "add", &format!("10.214.{subnet}.{}/24", index + 1), "dev", "kv"]);
            net.within(index, &["link", "set", "kv", "up"]);
        }
        for index in [0, 1] {
            let (other, by) = (&net.addresses[1 - index], format!("10.214.{subnet}.{}", 2 - index));
            net.within(index, &["route", "add", &format!("{other}/32"), "via", &by]);
        }
        Some(net)
    }

    /// The gateway's end of the link to the replica.
    fn control_link(&self, index: usize) -> String {
        let number = self.namespaces[index].rsplit('-').nth(1).unwrap();
        format!("bt{}-{number}-{index}", std::process::id())
    }

    /// Runs `ip` in the namespace of a replica.
    fn within(&self, index: usize, args: &[&str]) {
        assert!(ip(&[&["-n", &self.namespaces[index]], args].concat()), "{args:?}");
    }

    fn fleet(&self, make: &Make, faults: &[(usize, &str)]) -> Fleet {
        let key = std::env::temp_dir().join(format!("{}.key", self.namespaces[0]));
        fs::write(&key, &self.namespaces[0]).unwrap();
        let replica = |index: usize| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.namespaces[index]]).arg(baton().get_program());
            let host = ["--host", &self.addresses[index], "--migration-host", &self.addresses[index]];
            command.envs(faults.iter().filter(|(who, _)| *who == index).map(|(_, fault)| ("BATON_FAULT", fault)));
            make.spawn(command, &format!("r{index}"), &[host.as_slice(), &["--fleet-key-file", key.to_str().unwrap()]].concat())
        };
        let configured = make.clone().keyed(&key);
        let fleet = Fleet::of(&configured, [0, 1].map(replica).into());
        fs::remove_file(&key).unwrap();
        fleet
    }

    /// Runs it as a process there would.
    fn inside<T: Send>(&self, index: usize, run: impl FnOnce() -> T + Send) -> T {
        let space = File::open(format!("/run/netns/{}", self.namespaces[index])).unwrap();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: takes its arguments by value; the descriptor is open, and only this thread changes its namespace.
                assert_eq!(unsafe { libc::setns(space.as_raw_fd(), libc::CLONE_NEWNET) }, 0, "{}", std::io::Error::last_os_error());
                run()
            });
            thread.join().unwrap()
        })
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for (index, namespace) in self.namespaces.iter().enumerate() {
            // A socket that nobody reads any more keeps the namespace for minutes, and with it the link.
            ip(&["link", "delete", &self.control_link(index)]);
            ip(&["netns", "delete", namespace]);
        }
    }
}

fn ip(args: &[&str]) -> bool {
    Command::new("ip").args(args).output().is_ok_and(|output| output.status.success())
}

fn timed() -> Make {
    Make::timed().with(&["--blocks", "1024", "--max-model-len", "8192"])
}

fn ask() -> Ask {
    Ask::chat(&"what is told here is long ".repeat(200), TOKENS).sampled(7)
}

fn check(ask: &Ask, replica: &Server, answer: &Answer) {
    assert!(answer.is_whole(), "{answer:?}");
    assert_eq!(*answer, ask.answer(&replica.url, "alone"));
    assert_eq!(answer.tokens(), TOKENS as usize);
}

#[test]
fn a_request_stays_where_its_copy_is_cut_off() {
    let Some(net) = Net::new(0) else { return };
    // It stands still between its room and its answer, so that the link is cut while the source copies.
    let fleet = net.fleet(&timed(), &[(TARGET, "target-preparing:stop")]);
    let (ask, id) = (ask(), "cut");
    let reading = fleet.begin_at(SOURCE, &ask, id);
    let answer = std::thread::scope(|scope| {
        let moved = scope.spawn(|| fleet.migrate(id, TARGET));
        wait_for_stop(fleet.replicas[TARGET].pid());
        net.within(TARGET, &["link", "set", "kv", "down"]);
        signal(fleet.replicas[TARGET].pid(), libc::SIGCONT);
        let answer = reading.read_to_end();
        assert!(matches!(moved.join().unwrap(), Ordered::Stays));
        answer
    });
    // Nobody suspected anybody, and nothing was computed twice.
    assert!(fleet.moves().iter().all(|one| one["kind"] == "operator"), "{:?}", fleet.moves());
    check(&ask, &fleet.replicas[TARGET], &answer);
    fleet.until_at_rest();
}

/// Nothing says so to its source, which stands still and must not for ever.
#[test]
fn a_request_goes_on_where_it_stands_still_when_its_last_blocks_are_cut_off() {
    let Some(net) = Net::new(2) else { return };
    let fleet = net.fleet(&timed(), &[(SOURCE, "source-frozen:stop")]);
    let (ask, id) = (ask(), "cut");
    let reading = fleet.begin_at(SOURCE, &ask, id);
    let answer = std::thread::scope(|scope| {
        let moved = scope.spawn(|| fleet.migrate(id, TARGET));
        wait_for_stop(fleet.replicas[SOURCE].pid());
        net.within(TARGET, &["link", "set", "kv", "down"]);
        signal(fleet.replicas[SOURCE].pid(), libc::SIGCONT);
        let answer = reading.read_to_end();
        assert!(matches!(moved.join().unwrap(), Ordered::Stays));
        answer
    });
    check(&ask, &fleet.replicas[TARGET], &answer);
    fleet.until_at_rest();
}

/// Whether it can still be committed or not, one of the two goes on, and the one that cannot be told frees what it has.
#[test]
fn a_request_outlives_the_control_link_of_either_side_while_it_stands_still() {
    for (number, who, fault) in [(3, SOURCE, "source-frozen:stop"), (4, TARGET, "target-prepared:stop")] {
        let Some(net) = Net::new(number) else { return };
        let fleet = net.fleet(&timed(), &[(who, fault)]);
        let (ask, id) = (ask(), "cut");
        let reading = fleet.begin_at(SOURCE, &ask, id);
        let lost = &fleet.replicas[who];
        let answer = std::thread::scope(|scope| {
            scope.spawn(|| fleet.migrate(id, TARGET));
            wait_for_stop(lost.pid());
            assert!(ip(&["link", "set", &net.control_link(who), "down"]));
            signal(lost.pid(), libc::SIGCONT);
            reading.read_to_end()
        });
        check(&ask, &fleet.replicas[1 - who], &answer);
        net.inside(who, || until_empty(lost));
        assert!(ip(&["link", "set", &net.control_link(who), "up"]));
        fleet.until_connected();
        fleet.until_at_rest();
    }
}

#[test]
fn a_replica_that_its_gateway_cannot_reach_stops_and_frees_what_goes_on_elsewhere() {
    let Some(net) = Net::new(1) else { return };
    let fleet = net.fleet(&timed(), &[]);
    let (ask, id) = (ask(), "cut");
    let reading = fleet.begin_at(SOURCE, &ask, id);
    let source = &fleet.replicas[SOURCE];
    assert!(ip(&["link", "set", &net.control_link(SOURCE), "down"]));
    let answer = reading.read_to_end();
    check(&ask, &fleet.replicas[TARGET], &answer);
    // Nobody can tell it.
    net.inside(SOURCE, || until_empty(source));
    assert!(ip(&["link", "set", &net.control_link(SOURCE), "up"]));
    fleet.until_connected();
    fleet.until_at_rest();
}

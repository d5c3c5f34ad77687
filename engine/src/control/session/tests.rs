//! The session against a daemon that the test plays by hand, over a pair of sockets.

use std::sync::mpsc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::rdma_cm::{Ece, EventKind, Parameters, PortSpace, QpKind};

/// What the listener has heard, as text.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Listener for Heard {
    fn event(&self, event: Event) {
        self.0.lock().push(format!("{:?} {}", event.kind, event.id));
    }
    fn lost(&self, id: Id) {
        self.0.lock().push(format!("lost {id}"));
    }
}

impl Heard {
    fn wait_for(&self, count: usize) -> Vec<String> {
        let end = Instant::now() + Duration::from_secs(10);
        while self.0.lock().len() < count {
            assert!(Instant::now() < end, "heard only {:?}", self.0.lock());
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.lock().clone()
    }
}

/// The daemon's end of a connection.
struct Daemon(OwnedFd);

impl Daemon {
    fn next(&self) -> Request {
        let mut buffer = vec![0; MAX_MESSAGE];
        let length = protocol::receive_into(self.0.as_fd(), &mut buffer, RecvFlags::empty()).unwrap();
        protocol::decode(&buffer[..length]).expect("a request")
    }

    fn command(&self) -> (u32, Command) {
        match self.next() {
            Request::Cm { sequence, command } => (sequence, command),
            other => panic!("{other:?}"),
        }
    }

    fn say(&self, reply: &Reply) {
        protocol::send_message(&self.0, reply, SendFlags::empty()).unwrap();
    }

    fn done(&self, sequence: u32, result: Outcome) {
        self.news(Vec::new(), Some(CmAnswer { sequence, result }), Vec::new());
    }

    fn keepsake(&self, id: Id, state: &[u8]) {
        let state = Some(state.to_vec());
        self.news(vec![Keepsake { id, state }], None, Vec::new());
    }

    fn news(&self, keepsakes: Vec<Keepsake>, answer: Option<CmAnswer>, events: Vec<Event>) {
        self.say(&Reply::CmNews(CmNews {
            keepsakes,
            answer,
            events,
        }));
    }
}

fn pair() -> (Daemon, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    let (daemon, process) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let timeout = Some(ANSWER_TIMEOUT);
    rustix::net::sockopt::set_socket_timeout(&daemon, rustix::net::sockopt::Timeout::Recv, timeout).unwrap();
    rustix::net::sockopt::set_socket_timeout(&process, rustix::net::sockopt::Timeout::Recv, timeout).unwrap();
    (Daemon(daemon), process)
}

/// A session, and the daemons that it is going to find.
fn session() -> (Session, Heard, Daemon, mpsc::Sender<OwnedFd>) {
    let (next, coming) = mpsc::channel::<OwnedFd>();
    let coming = Mutex::new(coming);
    let (daemon, process) = pair();
    next.send(process).unwrap();
    let heard = Heard::default();
    let connect = Box::new(move || coming.lock().try_recv().map_err(|_| ControlError::NoDaemon));
    let session = Session::with(connect, Box::new(heard.clone())).unwrap();
    (session, heard, daemon, next)
}

fn create() -> Command {
    Command::Create {
        port_space: PortSpace::Tcp,
        qp_kind: QpKind::Rc,
    }
}

fn event(id: Id) -> Event {
    Event {
        id,
        kind: EventKind::Established,
        status: 0,
        details: crate::rdma_cm::Details::None,
        ece: Ece::default(),
        new_id: None,
        membership: None,
    }
}

#[test]
fn answers_find_who_asked_in_any_order() {
    let (session, heard, daemon, _next) = session();
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8).map(|id| (id, &session)).collect();
        let threads: Vec<_> = asking
            .into_iter()
            .map(|(id, session)| scope.spawn(move || (id, session.ask(Command::Disconnect { id }))))
            .collect();
        let mut commands: Vec<_> = (0..8).map(|_| daemon.command()).collect();
        commands.sort_by_key(|(sequence, _)| std::cmp::Reverse(*sequence));
        for (sequence, command) in commands {
            let Command::Disconnect { id } = command else {
                panic!("{command:?}");
            };
            daemon.news(Vec::new(), None, vec![event(id)]);
            daemon.done(sequence, Ok(Answer::Created(id + 100)));
        }
        for thread in threads {
            let (id, outcome) = thread.join().unwrap();
            assert_eq!(outcome, Ok(Answer::Created(id + 100)));
        }
    });
    assert_eq!(heard.wait_for(8).len(), 8);
    daemon.news(Vec::new(), None, vec![event(77)]);
    assert_eq!(heard.wait_for(9)[8], "Established 77", "heard while nobody asks");
}

#[test]
fn what_is_to_be_done_with_an_answer_comes_before_later_events() {
    let (session, heard, daemon, _next) = session();
    let list = heard.clone();
    let waiting = session.start(create(), move |outcome| {
        list.0.lock().push(format!("{outcome:?}"))
    });
    let (sequence, _) = daemon.command();
    daemon.done(sequence, Ok(Answer::Created(5)));
    daemon.news(Vec::new(), None, vec![event(5)]);
    assert_eq!(waiting.wait(), Ok(Answer::Created(5)));
    assert_eq!(heard.wait_for(2), ["Ok(Created(5))", "Established 5"]);

    let list = heard.clone();
    let waiting = session.start(Command::Disconnect { id: 5 }, move |outcome| {
        list.0.lock().push(format!("{outcome:?}"))
    });
    let (sequence, _) = daemon.command();
    let result = Ok(Answer::Done);
    daemon.news(
        Vec::new(),
        Some(CmAnswer { sequence, result }),
        vec![event(5), event(6)],
    );
    assert_eq!(waiting.wait(), Ok(Answer::Done));
    assert_eq!(
        heard.wait_for(5)[2..],
        ["Ok(Done)", "Established 5", "Established 6"]
    );
}

#[test]
fn errors_are_the_daemons() {
    let (session, _heard, daemon, _next) = session();
    let waiting = session.start(create(), |_| {});
    let (sequence, command) = daemon.command();
    assert_eq!(command, create());
    daemon.done(sequence, Err(libc::EADDRINUSE));
    assert_eq!(waiting.wait(), Err(libc::EADDRINUSE));
}

#[test]
fn a_new_daemon_gets_the_ids_and_the_commands_under_way() {
    let (session, heard, daemon, next) = session();
    daemon.keepsake(1, b"one");
    daemon.keepsake(2, b"two");
    daemon.keepsake(3, b"three");
    daemon.news(vec![Keepsake { id: 3, state: None }], None, Vec::new());
    session.taken(2);
    assert_eq!(daemon.command().1, Command::Taken { id: 2 });
    let listen = session.start(Command::Listen { id: 1, backlog: 5 }, |_| {});
    let destroy = session.start(Command::Destroy { id: 9 }, |_| {});
    daemon.command();
    daemon.command();
    daemon.news(Vec::new(), None, vec![event(1)]);
    heard.wait_for(1);
    let (daemon2, process) = pair();
    drop(daemon);
    assert_eq!(destroy.wait(), Ok(Answer::Done), "who destroys needs no daemon");
    next.send(process).unwrap();
    let Request::CmRestore(mut keepsakes) = daemon2.next() else {
        panic!("no keepsakes");
    };
    keepsakes.sort_by_key(|keepsake| keepsake.id);
    let states: Vec<_> = keepsakes
        .iter()
        .map(|it| (it.id, it.state.as_deref().unwrap()))
        .collect();
    assert_eq!(states, [(1, &b"one"[..]), (2, &b"two"[..])]);
    // A command that is given meanwhile waits.
    let connect = Command::Connect {
        id: 1,
        parameters: Parameters::default(),
        ece: Ece::default(),
    };
    let waiting = session.start(connect.clone(), |_| {});
    daemon2.say(&Reply::CmRestored { lost: vec![] });
    assert_eq!(daemon2.command().1, Command::Taken { id: 2 });
    let (sequence, command) = daemon2.command();
    assert_eq!(command, Command::Listen { id: 1, backlog: 5 });
    daemon2.done(sequence, Ok(Answer::Done));
    assert_eq!(listen.wait(), Ok(Answer::Done));
    let (sequence, command) = daemon2.command();
    assert_eq!(command, connect);
    daemon2.done(sequence, Ok(Answer::Done));
    assert_eq!(waiting.wait(), Ok(Answer::Done));
}

#[test]
fn ids_that_a_new_daemon_does_not_take_are_lost() {
    let (session, heard, daemon, next) = session();
    daemon.keepsake(1, b"one");
    daemon.keepsake(2, b"two");
    daemon.news(Vec::new(), None, vec![event(2)]);
    heard.wait_for(1);
    let (daemon2, process) = pair();
    next.send(process).unwrap();
    drop(daemon);
    assert!(matches!(daemon2.next(), Request::CmRestore(all) if all.len() == 2));
    daemon2.say(&Reply::CmRestored { lost: vec![2] });
    assert_eq!(heard.wait_for(2)[1], "lost 2");
    // The next daemon does not hear of it.
    let (daemon3, process) = pair();
    next.send(process).unwrap();
    drop(daemon2);
    assert!(matches!(daemon3.next(), Request::CmRestore(all) if all.len() == 1 && all[0].id == 1));
    drop(session);
}

#[test]
fn many_keepsakes_go_in_several_messages() {
    let (_session, heard, daemon, next) = session();
    for id in 0..300 {
        daemon.keepsake(id, &[id as u8; 1000]);
    }
    daemon.news(Vec::new(), None, vec![event(2)]);
    heard.wait_for(1);
    let (daemon2, process) = pair();
    next.send(process).unwrap();
    drop(daemon);
    let mut ids = BTreeSet::new();
    while ids.len() < 300 {
        let Request::CmRestore(keepsakes) = daemon2.next() else {
            panic!("no keepsakes");
        };
        assert!(keepsakes.len() < 100);
        ids.extend(keepsakes.iter().map(|keepsake| keepsake.id));
        daemon2.say(&Reply::CmRestored { lost: vec![] });
    }
}

#[test]
fn what_a_daemon_said_before_it_died_is_heard() {
    let (_session, heard, daemon, next) = session();
    // It dies with a message unread, which resets the connection.
    let (dying, process) = pair();
    dying.news(Vec::new(), None, vec![event(4)]);
    dying.keepsake(4, b"four");
    protocol::send(process.as_fd(), b"never read", &[], SendFlags::empty()).unwrap();
    drop(dying);
    next.send(process).unwrap();
    drop(daemon);
    assert_eq!(heard.wait_for(1), ["Established 4"]);
    let (daemon, process) = pair();
    next.send(process).unwrap();
    let Request::CmRestore(keepsakes) = daemon.next() else {
        panic!("no keepsakes");
    };
    assert_eq!(keepsakes.len(), 1);
    assert_eq!(keepsakes[0].id, 4);
}

#[test]
fn a_repeated_command_fails_as_the_new_daemon_says() {
    let (session, _heard, daemon, next) = session();
    daemon.keepsake(1, b"bound");
    let listen = session.start(Command::Listen { id: 1, backlog: 5 }, |_| {});
    daemon.command();
    let (daemon2, process) = pair();
    next.send(process).unwrap();
    drop(daemon);
    assert!(matches!(daemon2.next(), Request::CmRestore(_)));
    daemon2.say(&Reply::CmRestored { lost: vec![] });
    let (sequence, _) = daemon2.command();
    let state = Some(b"bound".to_vec());
    let result = Err(libc::EINVAL);
    daemon2.news(
        vec![Keepsake { id: 1, state }],
        Some(CmAnswer { sequence, result }),
        Vec::new(),
    );
    assert_eq!(listen.wait(), Err(libc::EINVAL));
}

#[test]
fn a_dropped_session_closes_the_connection() {
    let (session, _heard, daemon, _next) = session();
    drop(session);
    let mut buffer = vec![0; 16];
    let length = protocol::receive_into(daemon.0.as_fd(), &mut buffer, RecvFlags::empty()).unwrap();
    assert_eq!(length, 0);
}

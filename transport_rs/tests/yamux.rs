//! Two yamux sessions against each other over a wire that cuts bytes anywhere, and one against a peer that misbehaves.

use std::collections::HashMap;

use llmnode_transport::yamux::{
    ACK, Events, FIN, HEADER_BYTES, Header, INITIAL_WINDOW_BYTES, Kind, Limits, OpenError, RST, ReadResult, Role, SYN,
    Yamux, YamuxError,
};
use proptest::prelude::*;

/// One side, and what its user has done: the obvious twin of the session, in which every stream is a whole.
struct Side {
    session: Yamux,
    wire: Vec<u8>,
    opened: Vec<u32>,
    sent: HashMap<u32, Vec<u8>>,
    received: HashMap<u32, Vec<u8>>,
    ended: HashMap<u32, bool>,
    given_up: Vec<u32>,
}

impl Side {
    fn new(role: Role) -> Self {
        Self {
            session: Yamux::new(role, Limits::default()),
            wire: Vec::new(),
            opened: Vec::new(),
            sent: HashMap::new(),
            received: HashMap::new(),
            ended: HashMap::new(),
            given_up: Vec::new(),
        }
    }

    fn take_output(&mut self) {
        self.wire.extend_from_slice(self.session.output());
        self.session.clear_output();
    }

    fn deliver_to(&mut self, other: &mut Side, bytes: usize) {
        self.take_output();
        let arriving: Vec<u8> = self.wire.drain(..bytes.min(self.wire.len())).collect();
        let mut events = Events::default();
        other.session.receive(&arriving, &mut events).expect("a peer that obeys the protocol is never refused");
        other.opened.extend(events.opened);
        other.given_up.extend(events.reset);
    }

    fn write(&mut self, stream: u32, length: usize) {
        let first = self.sent.get(&stream).map_or(0, Vec::len);
        let [.., salt] = stream.to_be_bytes();
        let bytes: Vec<u8> = (0..251).map(|byte: u8| byte ^ salt).cycle().skip(first % 251).take(length).collect();
        if let Some(taken) = self.session.write(stream, &bytes, false) {
            self.sent.entry(stream).or_default().extend_from_slice(&bytes[..taken]);
        }
    }

    fn read(&mut self, stream: u32, length: usize, now_s: f64) -> ReadResult {
        let mut out = vec![0; length];
        let result = self.session.read(stream, &mut out, now_s, u32::MAX);
        match result {
            ReadResult::Data(taken) => self.received.entry(stream).or_default().extend_from_slice(&out[..taken]),
            ReadResult::End => drop(self.ended.insert(stream, true)),
            ReadResult::Wait => {}
        }
        result
    }
}

#[derive(Clone, Debug)]
enum Act {
    Open,
    Write(usize, usize),
    Read(usize, usize),
    Close(usize),
    Reset(usize),
    Deliver(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        1 => Just(Act::Open),
        6 => (0_usize..8, 0_usize..400_000).prop_map(|(stream, length)| Act::Write(stream, length)),
        6 => (0_usize..8, 1_usize..400_000).prop_map(|(stream, length)| Act::Read(stream, length)),
        1 => (0_usize..8).prop_map(Act::Close),
        1 => (0_usize..20).prop_map(Act::Reset),
        8 => (0_usize..300_000).prop_map(Act::Deliver),
    ]
}

fn perform(side: &mut Side, other: &mut Side, act: &Act, now_s: f64) {
    let chosen = |side: &Side, index: usize| side.opened.get(index).copied();
    match *act {
        Act::Open => side.opened.extend(side.session.open()),
        Act::Deliver(bytes) => side.deliver_to(other, bytes),
        Act::Write(index, length) => drop(chosen(side, index).map(|stream| side.write(stream, length))),
        Act::Read(index, length) => drop(chosen(side, index).map(|stream| side.read(stream, length, now_s))),
        Act::Close(index) => drop(chosen(side, index).map(|stream| side.session.close(stream))),
        Act::Reset(index) => {
            if let Some(stream) = chosen(side, index) {
                side.session.reset(stream);
                side.given_up.push(stream);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn every_stream_carries_its_bytes_in_order_whatever_the_schedule(
        acts in prop::collection::vec((any::<bool>(), act()), 0..150),
    ) {
        let mut sides = [Side::new(Role::Initiator), Side::new(Role::Responder)];
        let mut now_s = 0.0;
        for (first, act) in &acts {
            now_s += 0.1;
            let [one, two] = &mut sides;
            let (side, other) = if *first { (one, two) } else { (two, one) };
            perform(side, other, act, now_s);
        }
        let [one, two] = &mut sides;
        let streams: Vec<u32> = one.opened.iter().chain(&two.opened).copied().collect();
        for _ in 0..100 {
            one.deliver_to(two, usize::MAX);
            two.deliver_to(one, usize::MAX);
            for stream in &streams {
                one.session.close(*stream);
                two.session.close(*stream);
                one.read(*stream, 1 << 20, now_s);
                two.read(*stream, 1 << 20, now_s);
            }
        }
        for stream in &streams {
            let whole = !one.given_up.contains(stream) && !two.given_up.contains(stream);
            for (from, to) in [(&*one, &*two), (&*two, &*one)] {
                let (sent, got) = (from.sent.get(stream), to.received.get(stream));
                let (sent, got) = (sent.map_or(&[][..], |all| all), got.map_or(&[][..], |all| all));
                prop_assert!(sent.starts_with(got));
                prop_assert!(!whole || sent.len() == got.len());
                prop_assert!(to.ended.contains_key(stream));
            }
        }
        prop_assert_eq!((one.session.streams(), two.session.streams()), (0, 0));
    }
}

fn frame(kind: Kind, flags: u16, stream: u32, length: u32) -> [u8; HEADER_BYTES] {
    Header { kind, flags, stream, length }.encode()
}

fn answers(session: &mut Yamux) -> Vec<Header> {
    let frames = session.output().chunks(HEADER_BYTES);
    let found = frames.map(|bytes| Header::decode(bytes.try_into().unwrap()).unwrap()).collect();
    session.clear_output();
    found
}

/// A session in which the other side has opened stream 1.
fn opened() -> Yamux {
    let mut session = Yamux::new(Role::Responder, Limits::default());
    session.receive(&frame(Kind::WindowUpdate, SYN, 1, 0), &mut Events::default()).unwrap();
    session.clear_output();
    session
}

#[test]
fn what_is_against_the_protocol_is_a_typed_error_and_stays_one() {
    let too_much = INITIAL_WINDOW_BYTES + 1;
    let misdeeds = [
        (YamuxError::BadHeader, vec![1; HEADER_BYTES]),
        (YamuxError::BadHeader, [&[0, 4], &[0; 10][..]].concat()),
        (YamuxError::BadStream, frame(Kind::Data, SYN, 0, 0).to_vec()),
        (YamuxError::BadStream, frame(Kind::WindowUpdate, 0, 0, 1).to_vec()),
        (YamuxError::BadOpen, frame(Kind::WindowUpdate, SYN, 1, 0).to_vec()),
        (YamuxError::BadOpen, frame(Kind::Data, SYN, 2, 0).to_vec()),
        (YamuxError::WindowExceeded, frame(Kind::Data, 0, 1, too_much).to_vec()),
        (YamuxError::WindowExceeded, frame(Kind::Data, SYN, 3, u32::MAX).to_vec()),
        (YamuxError::WindowOverflow, frame(Kind::WindowUpdate, 0, 1, u32::MAX).to_vec()),
        (YamuxError::DataAfterEnd, [frame(Kind::Data, FIN, 1, 0), frame(Kind::Data, 0, 1, 1)].concat()),
    ];
    for (error, bytes) in misdeeds {
        let mut session = opened();
        assert_eq!(session.receive(&bytes, &mut Events::default()), Err(error), "{bytes:?}");
        assert_eq!(answers(&mut session).pop().unwrap(), Header { kind: Kind::GoAway, flags: 0, stream: 0, length: 1 });
        assert_eq!(session.receive(&frame(Kind::Ping, SYN, 0, 0), &mut Events::default()), Err(error));
        assert_eq!(session.open(), Err(OpenError::GoingAway));
    }
}

#[test]
fn a_flood_of_streams_is_reset_at_the_limit() {
    let mut session = Yamux::new(Role::Responder, Limits::default());
    let mut events = Events::default();
    for index in 0..1000 {
        session.receive(&frame(Kind::WindowUpdate, SYN, 2 * index + 1, 0), &mut events).unwrap();
    }
    let flags: Vec<u16> = answers(&mut session).iter().map(|answer| answer.flags).collect();
    assert_eq!(flags, [[ACK; 256].as_slice(), [RST; 744].as_slice()].concat());
    assert_eq!((events.opened.len(), session.streams()), (256, 256));
    session.reset(1);
    session.receive(&frame(Kind::Data, SYN, 9001, 0), &mut events).unwrap();
    assert_eq!(events.opened.last(), Some(&9001));
}

#[test]
fn answers_that_nobody_reads_are_bounded() {
    for question in [frame(Kind::Ping, SYN, 0, 7), frame(Kind::WindowUpdate, SYN | RST, 5, 0)] {
        let mut session = Yamux::new(Role::Responder, Limits::default());
        let refused = (0..1_000_000).find_map(|_| session.receive(&question, &mut Events::default()).err());
        assert_eq!(refused, Some(YamuxError::AnswersUnread));
        assert!(session.output().len() <= (256 + 64) * 1024 + HEADER_BYTES);
    }
}

#[test]
fn a_ping_is_answered_with_its_own_number() {
    let mut session = opened();
    session.receive(&frame(Kind::Ping, SYN, 0, 77), &mut Events::default()).unwrap();
    session.receive(&frame(Kind::Ping, ACK, 0, 78), &mut Events::default()).unwrap();
    assert_eq!(answers(&mut session), [Header { kind: Kind::Ping, flags: ACK, stream: 0, length: 77 }]);
}

#[test]
fn nothing_is_sent_beyond_the_window_and_the_rest_follows_its_update() {
    let mut session = opened();
    let data = vec![0; 1 << 20];
    let mut sent = 0;
    while let Some(taken @ 1..) = session.write(1, &data, false) {
        sent += taken;
        session.clear_output();
    }
    assert_eq!(sent, INITIAL_WINDOW_BYTES as usize);
    let mut events = Events::default();
    session.receive(&frame(Kind::WindowUpdate, 0, 1, 1000), &mut events).unwrap();
    assert_eq!(events.writable, [1]);
    assert_eq!(session.write(1, &data, false), Some(1000));
}

/// Has `to` receive what `from` sends.
fn pass(from: &mut Yamux, to: &mut Yamux) -> Events {
    let mut events = Events::default();
    to.receive(from.output(), &mut events).unwrap();
    from.clear_output();
    events
}

#[test]
fn who_writes_gently_waits_until_the_other_side_has_taken_in_what_is_under_way() {
    let mut near = Yamux::new(Role::Initiator, Limits::default());
    let mut far = Yamux::new(Role::Responder, Limits::default());
    near.tell_time(0.0);
    let stream = near.open().unwrap();
    pass(&mut near, &mut far);
    near.tell_time(0.001);
    pass(&mut far, &mut near); // it knows how long a round trip is
    near.receive(&frame(Kind::WindowUpdate, 0, stream, 16 << 20), &mut Events::default()).unwrap();
    far.clear_output();

    let (data, mut wire, mut sent) = (vec![0; 16 << 20], Vec::new(), 0);
    while let Some(taken @ 1..) = near.write(stream, &data[..16 << 10], true) {
        sent += taken;
        wire.extend_from_slice(near.output());
        near.clear_output();
    }
    assert!((64 << 10..=128 << 10).contains(&sent), "{sent}");
    far.receive(&wire[..wire.len() / 2], &mut Events::default()).unwrap();
    assert_eq!(pass(&mut far, &mut near).writable, [stream]);
    assert!(matches!(near.write(stream, &data, true), Some(1..=0x1_0000)));
    assert!(matches!(near.write(stream, &data, false), Some(0x1_0000..)), "who need not does not");
}

#[test]
fn small_reads_do_not_cost_an_update_each() {
    let mut session = opened();
    let mut updates = 0;
    for _ in 0..1024 {
        session.receive(&frame(Kind::Data, 0, 1, 1024), &mut Events::default()).unwrap();
        session.receive(&[0; 1024], &mut Events::default()).unwrap();
        assert_eq!(session.read(1, &mut [0; 4096], 0.0, u32::MAX), ReadResult::Data(1024));
        updates += answers(&mut session).len();
    }
    assert!(updates <= 8, "{updates} updates for 1 MiB");
}

/// How large the window is after `rounds` in which all of it is sent and read.
fn window_after(rounds: usize, seconds_a_round: f64) -> u32 {
    let mut session = opened();
    let mut may_send = INITIAL_WINDOW_BYTES;
    let mut window = may_send;
    let mut out = vec![0; 32 << 20];
    for round in 0..u32::try_from(rounds).unwrap() {
        session.receive(&frame(Kind::Data, 0, 1, may_send), &mut Events::default()).unwrap();
        session.receive(&vec![0; may_send as usize], &mut Events::default()).unwrap();
        session.read(1, &mut out, f64::from(round) * seconds_a_round, u32::MAX);
        may_send = answers(&mut session).iter().map(|update| update.length).sum();
        window = may_send;
    }
    window
}

#[test]
fn a_window_grows_for_a_fast_stream_alone_and_never_beyond_its_limit() {
    assert_eq!(window_after(20, 5.0), 4 * INITIAL_WINDOW_BYTES);
    assert_eq!(window_after(2, 0.1), 16 * INITIAL_WINDOW_BYTES);
    assert_eq!(window_after(20, 0.1), 16 << 20);
}

/// Answers the pings of `session`, each after `seconds`.
fn be_pinged(session: &mut Yamux, seconds: f64) {
    let mut now_s = 0.0;
    loop {
        session.tell_time(now_s);
        let Some(ping) = answers(session).pop() else { return };
        assert_eq!((ping.kind, ping.flags), (Kind::Ping, SYN));
        now_s += seconds;
        session.tell_time(now_s);
        session.receive(&frame(Kind::Ping, ACK, 0, ping.length), &mut Events::default()).unwrap();
    }
}

#[test]
fn a_window_grows_with_the_round_trip() {
    // Half of the window every 20 ms: of which nothing waits in 1 ms, and all waits in 100 ms.
    for (round_trip_s, grows) in [(0.001, false), (0.1, true)] {
        let mut session = opened();
        be_pinged(&mut session, round_trip_s);
        let mut given = 0;
        for round in 0..20_u32 {
            session.receive(&frame(Kind::Data, 0, 1, INITIAL_WINDOW_BYTES), &mut Events::default()).unwrap();
            session.receive(&vec![0; INITIAL_WINDOW_BYTES as usize], &mut Events::default()).unwrap();
            session.read(1, &mut vec![0; 1 << 20], 1.0 + 0.02 * f64::from(round), u32::MAX);
            given += answers(&mut session).iter().map(|update| update.length).sum::<u32>();
        }
        let grown = given.saturating_sub(20 * INITIAL_WINDOW_BYTES);
        assert_eq!(grown > 4 * INITIAL_WINDOW_BYTES, grows, "{grown} at {round_trip_s} s");
    }
}

#[test]
fn pings_are_few_and_an_answer_that_was_not_asked_for_counts_for_nothing() {
    let mut session = opened();
    session.receive(&frame(Kind::Ping, ACK, 0, 1), &mut Events::default()).unwrap();
    let mut pings = 0;
    for round in 0..1000_u32 {
        session.tell_time(f64::from(round) * 0.01);
        pings += answers(&mut session).len();
    }
    assert_eq!(pings, 10, "one a second, as nobody answers");
    be_pinged(&mut session, 0.01);
}

#[test]
fn windows_grow_together_no_further_than_the_connection_allows() {
    let limits = Limits { grown_windows_bytes: 1 << 20, ..Limits::default() };
    let mut session = Yamux::new(Role::Responder, limits);
    let (mut used, mut given) = (0, 0);
    for stream in (1..64).step_by(2) {
        session.receive(&frame(Kind::Data, SYN, stream, 0), &mut Events::default()).unwrap();
        for round in 0..4 {
            session.receive(&frame(Kind::Data, 0, stream, INITIAL_WINDOW_BYTES), &mut Events::default()).unwrap();
            session.receive(&vec![0; INITIAL_WINDOW_BYTES as usize], &mut Events::default()).unwrap();
            session.read(stream, &mut vec![0; 1 << 20], 0.1 * f64::from(round), u32::MAX);
            used += INITIAL_WINDOW_BYTES;
        }
        given += answers(&mut session).iter().map(|update| update.length).sum::<u32>();
    }
    assert!((used + 1..=used + (1 << 20)).contains(&given), "{given} for {used}");
}

#[test]
fn data_for_a_stream_that_was_reset_is_dropped() {
    let mut session = opened();
    session.reset(1);
    session.receive(&frame(Kind::Data, 0, 1, 1 << 20), &mut Events::default()).unwrap();
    session.receive(&vec![0; 1 << 20], &mut Events::default()).unwrap();
    session.receive(&frame(Kind::Ping, SYN, 0, 1), &mut Events::default()).unwrap();
    assert_eq!(answers(&mut session).last().unwrap().kind, Kind::Ping);
    assert_eq!((session.streams(), session.buffered_bytes(1)), (0, 0));
}

#[test]
fn after_a_farewell_no_stream_is_opened_from_either_side() {
    let mut session = opened();
    session.receive(&frame(Kind::GoAway, 0, 0, 0), &mut Events::default()).unwrap();
    assert_eq!(session.open(), Err(OpenError::GoingAway));
    assert_eq!(session.write(1, b"still", false), Some(5));
    session.clear_output();
    session.receive(&frame(Kind::Data, SYN, 3, 0), &mut Events::default()).unwrap();
    assert_eq!(answers(&mut session)[0].flags, RST);
}

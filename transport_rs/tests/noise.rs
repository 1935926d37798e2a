//! Noise against `snow` alone, and against itself however the bytes are cut.

use llmnode_transport::noise::{Handshake, NoiseError, PLAINTEXT_BYTES_MAX, Role, Session};
use proptest::prelude::*;

const OURS: [u8; 32] = [1; 32];
const THEIRS: [u8; 32] = [2; 32];

fn pair() -> (Session, Session) {
    (Session::new(&OURS, &THEIRS).unwrap(), Session::new(&THEIRS, &OURS).unwrap())
}

fn seal(session: &mut Session, plaintext: &[u8]) -> Vec<u8> {
    let mut out = vec![0; Session::sealed_bytes(plaintext.len())];
    session.seal(plaintext, &mut out).unwrap();
    out
}

/// Decrypts `bytes`, fed in pieces whose lengths come from `cuts`, over and over.
fn open(session: &mut Session, mut bytes: &[u8], cuts: &[usize]) -> Result<Vec<u8>, NoiseError> {
    let mut plaintext = Vec::new();
    for cut in cuts.iter().chain(&[1]).cycle() {
        let (now, later) = bytes.split_at(bytes.len().min((*cut).max(1)));
        session.open(now, |message| {
            plaintext.extend_from_slice(message);
            Ok::<_, NoiseError>(())
        })?;
        bytes = later;
        if bytes.is_empty() {
            break;
        }
    }
    Ok(plaintext)
}

fn snow_side(initiator: bool) -> snow::HandshakeState {
    let builder = snow::Builder::new("Noise_XX_25519_ChaChaPoly_SHA256".parse().unwrap());
    let builder = builder.local_private_key(&THEIRS).unwrap();
    if initiator { builder.build_initiator().unwrap() } else { builder.build_responder().unwrap() }
}

fn snow_message(state: &mut snow::HandshakeState, payload: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 65535];
    let len = state.write_message(payload, &mut message).unwrap();
    [&u16::try_from(len).unwrap().to_be_bytes()[..], &message[..len]].concat()
}

fn receive(handshake: &mut Handshake, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut payload = None;
    for byte in bytes {
        assert_eq!(payload, None);
        payload = handshake.receive(&[*byte]).unwrap();
    }
    payload
}

#[test]
fn the_handshake_and_the_messages_after_it_are_those_of_snow_in_either_role() {
    for role in [Role::Initiator, Role::Responder] {
        let mut ours = Handshake::new(role, &OURS, None).unwrap();
        let mut theirs = snow_side(role == Role::Responder);
        let mut read = vec![0; 65535];
        let sends = [role == Role::Initiator, role == Role::Responder, role == Role::Initiator];
        for (turn, we_send) in sends.into_iter().enumerate() {
            let payload = vec![7; turn * 100];
            if we_send {
                let message = ours.send(&payload).unwrap();
                let len = theirs.read_message(&message[2..], &mut read).unwrap();
                assert_eq!(read[..len], payload);
            } else {
                assert_eq!(receive(&mut ours, &snow_message(&mut theirs, &payload)), Some(payload));
            }
        }
        assert_eq!(ours.remote_static().unwrap(), snow_public_key());
        let (mut session, rest) = ours.finish().unwrap();
        assert!(rest.is_empty());
        let mut theirs = theirs.into_transport_mode().unwrap();
        for length in [0, 1, 1000, PLAINTEXT_BYTES_MAX] {
            let plaintext = vec![9; length];
            let mut message = vec![0; 65535];
            let len = theirs.write_message(&plaintext, &mut message).unwrap();
            let framed = [&u16::try_from(len).unwrap().to_be_bytes()[..], &message[..len]].concat();
            assert_eq!(open(&mut session, &framed, &[100]).unwrap(), plaintext);
            let sealed = seal(&mut session, &plaintext);
            if length > 0 {
                let len = theirs.read_message(&sealed[2..], &mut read).unwrap();
                assert_eq!(read[..len], plaintext);
            }
        }
    }
}

/// The public half of `THEIRS`, by snow.
fn snow_public_key() -> [u8; 32] {
    let (mut state, mut other) = (snow_side(false), snow_side(true));
    let (mut message, mut read) = (vec![0; 65535], vec![0; 65535]);
    let len = other.write_message(&[], &mut message).unwrap();
    state.read_message(&message[..len], &mut read).unwrap();
    let len = state.write_message(&[], &mut message).unwrap();
    other.read_message(&message[..len], &mut read).unwrap();
    other.get_remote_static().unwrap().try_into().unwrap()
}

#[test]
fn bytes_that_follow_the_handshake_at_once_are_not_lost() {
    let mut initiator = Handshake::new(Role::Initiator, &OURS, None).unwrap();
    let mut responder = Handshake::new(Role::Responder, &THEIRS, None).unwrap();
    responder.receive(&initiator.send(b"").unwrap()).unwrap().unwrap();
    initiator.receive(&responder.send(b"proof").unwrap()).unwrap().unwrap();
    let mut bytes = initiator.send(b"proof").unwrap();
    let (mut session, _) = initiator.finish().unwrap();
    bytes.extend(seal(&mut session, b"early"));
    assert_eq!(responder.receive(&bytes).unwrap().unwrap(), b"proof");
    let (mut session, rest) = responder.finish().unwrap();
    assert_eq!(open(&mut session, &rest, &[]).unwrap(), b"early");
}

#[test]
fn a_handshake_out_of_turn_or_unfinished_is_an_error() {
    let mut responder = Handshake::new(Role::Responder, &OURS, None).unwrap();
    assert!(matches!(responder.send(b""), Err(NoiseError::Handshake(_))));
    assert!(matches!(responder.finish(), Err(NoiseError::Handshake(_))));
    let mut initiator = Handshake::new(Role::Initiator, &OURS, None).unwrap();
    assert!(matches!(initiator.receive(&[0, 0]), Err(NoiseError::Handshake(_))));
    assert!(matches!(initiator.send(&vec![0; 70_000]), Err(NoiseError::Handshake(_))));
}

#[test]
fn a_message_cannot_be_repeated_left_out_or_swapped() {
    for order in [vec![0, 0], vec![1], vec![1, 0], vec![0, 2]] {
        let (mut ours, mut theirs) = pair();
        let messages = [seal(&mut ours, b"a"), seal(&mut ours, b"b"), seal(&mut ours, b"c")];
        let bytes: Vec<u8> = order.iter().flat_map(|index| messages[*index].clone()).collect();
        assert_eq!(open(&mut theirs, &bytes, &[]), Err(NoiseError::Forged));
    }
}

#[test]
fn a_message_shorter_than_its_tag_is_refused_by_its_length_alone() {
    for length in 0..16_u16 {
        let (mut ours, _) = pair();
        let refused = Err(NoiseError::TooShort { found: usize::from(length) });
        assert_eq!(open(&mut ours, &length.to_be_bytes(), &[]), refused);
    }
}

proptest! {
    #[test]
    fn what_is_sealed_is_opened_however_it_is_cut(
        texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5000), 1..8),
        long in 0_usize..200_000,
        cuts in prop::collection::vec(1_usize..70_000, 0..5),
    ) {
        let (mut ours, mut theirs) = pair();
        let mut texts = texts;
        texts.push(vec![3; long]);
        let bytes: Vec<u8> = texts.iter().flat_map(|text| seal(&mut ours, text)).collect();
        prop_assert_eq!(open(&mut theirs, &bytes, &cuts).unwrap(), texts.concat());
    }

    #[test]
    fn a_changed_bit_is_noticed_and_nothing_after_it_is_believed(
        text in prop::collection::vec(any::<u8>(), 1..300),
        bit in any::<prop::sample::Index>(),
        cuts in prop::collection::vec(1_usize..100, 0..5),
    ) {
        let (mut ours, mut theirs) = pair();
        let mut bytes = seal(&mut ours, &text);
        let bit = bit.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes.extend(seal(&mut ours, &text));
        // A length that became larger may swallow what follows and still wait for more.
        let opened = open(&mut theirs, &bytes, &cuts);
        prop_assert!(opened.is_err() || opened == Ok(vec![]), "{:?}", opened);
    }
}

/// A whole handshake between sides with these swarm keys, in memory; what the responder proved, if it got that far.
fn shaken(initiator: Option<&[u8; 32]>, responder: Option<&[u8; 32]>) -> Result<Vec<u8>, NoiseError> {
    let mut initiator = Handshake::new(Role::Initiator, &OURS, initiator)?;
    let mut responder = Handshake::new(Role::Responder, &THEIRS, responder)?;
    responder.receive(&initiator.send(b"")?)?;
    let proof = initiator.receive(&responder.send(b"who I am")?)?.ok_or(NoiseError::Forged)?;
    responder.receive(&initiator.send(b"and I")?)?;
    initiator.finish()?;
    responder.finish()?;
    Ok(proof)
}

#[test]
fn only_members_of_a_private_swarm_shake_hands() {
    assert_eq!(shaken(Some(&[1; 32]), Some(&[1; 32])).unwrap(), b"who I am");
    assert_eq!(shaken(None, None).unwrap(), b"who I am");
    for (initiator, responder) in [(Some(&[1; 32]), Some(&[2; 32])), (Some(&[1; 32]), None), (None, Some(&[1; 32]))] {
        assert!(matches!(shaken(initiator, responder), Err(NoiseError::Handshake(_))));
    }
}

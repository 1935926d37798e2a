//! The work of the fuzz targets; `tests/mutations.rs` does the same on stable Rust.
//!
//! Each takes any bytes, must not panic, and checks that memory stays bounded.

use llmnode_transport::codec::{self, Code, Dtype, Format};
use llmnode_transport::noise::{Handshake, NoiseError, Role, Session};
use llmnode_transport::packing;
use llmnode_transport::yamux::{Events, Limits, ReadResult, Yamux};

pub const KEYS: [[u8; 32]; 2] = [[1; 32], [2; 32]];

/// Messages that arrive after the handshake; the first byte says where they are cut.
pub fn noise_open(data: &[u8]) {
    let Some((cut, bytes)) = data.split_first() else { return };
    let mut session = Session::new(&KEYS[1], &KEYS[0]).expect("the keys have the right length");
    let mut opened = 0;
    for part in bytes.chunks(usize::from(*cut).max(1)) {
        let result = session.open(part, |plaintext| {
            opened += plaintext.len();
            Ok::<_, NoiseError>(())
        });
        if result.is_err() {
            break;
        }
    }
    assert!(opened <= bytes.len());
}

/// Messages of a handshake, in the role that the first byte says.
pub fn noise_handshake(data: &[u8]) {
    let Some((first, bytes)) = data.split_first() else { return };
    let role = if first % 2 == 0 { Role::Initiator } else { Role::Responder };
    let mut handshake = Handshake::new(role, &KEYS[0], None).expect("the system has randomness");
    if role == Role::Initiator {
        handshake.send(b"").expect("it is our turn");
    }
    for part in bytes.chunks(usize::from(first / 2).max(1)) {
        match handshake.receive(part) {
            Ok(Some(_)) => drop(handshake.send(b"proof")),
            Ok(None) => {}
            Err(_) => return,
        }
    }
    drop(handshake.finish());
}

/// Frames; the first byte says where they are cut, and what is done with the streams between.
pub fn yamux_receive(data: &[u8]) {
    let Some((first, bytes)) = data.split_first() else { return };
    let limits = Limits { streams_inbound: 8, ..Limits::default() };
    let mut session = Yamux::new(Role::Responder, limits);
    let mut out = [0; 1000];
    for (round, part) in bytes.chunks(usize::from(*first).max(1)).enumerate() {
        let mut events = Events::default();
        session.tell_time(0.3 * f64::from(u32::try_from(round).unwrap_or(0)));
        let result = session.receive(part, &mut events);
        assert!(session.streams() <= limits.streams_inbound + limits.streams_outbound);
        assert!(session.output().len() <= limits.out_data_bytes + limits.out_control_bytes + 100);
        if result.is_err() {
            return;
        }
        for stream in events.readable {
            assert!(session.buffered_bytes(stream) <= bytes.len());
            if first % 3 != 0 {
                while let ReadResult::Data(_) = session.read(stream, &mut out, 0.1, u32::MAX) {}
            }
        }
        for stream in events.writable {
            session.write(stream, &out, false);
        }
        match (round + usize::from(*first)) % 7 {
            0 => drop(session.open()),
            1 => events.opened.iter().for_each(|stream| session.close(*stream)),
            2 => events.opened.iter().for_each(|stream| session.reset(*stream)),
            3 => session.clear_output(),
            _ => {}
        }
    }
}

/// Quantized values; the first three bytes choose the format.
pub fn dequantize(data: &[u8]) {
    let Some(([dtype, code, block], encoded)) = data.split_first_chunk() else { return };
    let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16][usize::from(dtype % 3)];
    let code = [Code::Linear, Code::Dynamic][usize::from(code % 2)];
    let Ok(format) = Format::new(dtype, code, 64 << (block % 8)) else { return };
    // The count of values that this many bytes are right for, and one more, for which they are not.
    let count = (0..=encoded.len()).rev().find(|count| format.encoded_bytes(*count) == Some(encoded.len()));
    for count in count.into_iter().flat_map(|count| [count, count + 1]) {
        let mut out = vec![0; format.decoded_bytes(count).expect("a small number")];
        let _ = codec::decode(format, encoded, &mut out, 1);
    }
}

/// Packed values; the first byte is not used. Values that unpack can be packed again.
pub fn unpack(data: &[u8]) {
    let Some((_, packed)) = data.split_first() else { return };
    let Ok(size) = packing::unpacked_bytes(packed) else { return };
    assert!(size <= 4 * packed.len(), "a bomb");
    let mut out = vec![0; size];
    if packing::unpack(packed, &mut out).is_ok() {
        let width = usize::from(packed[0]);
        let again = packing::pack(&out, width).expect("of a width that there is");
        assert_eq!(packing::unpacked_bytes(&again), Ok(size));
    }
}

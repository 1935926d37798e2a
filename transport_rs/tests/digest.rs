//! BLAKE3 against a recursive twin, the official vectors, and itself in pieces.

use llmnode_transport::digest::{blake3_digest, blake3_digest_parts};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// More chunks than the widest SIMD path takes at once (16), and a ragged end.
const MAX_BYTES: usize = 20 * 1024;

/// The input of the official vectors: 0, 1, ..., 250, 0, 1, ...
fn official_input(len: usize) -> Vec<u8> {
    (0..=250).cycle().take(len).collect()
}

fn hex(digest: [u8; 32]) -> String {
    blake3::Hash::from(digest).to_string()
}

/// The first 32 bytes of "hash" in `test_vectors/test_vectors.json` of the BLAKE3 team.
const OFFICIAL: [(usize, &str); 7] = [
    (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
    (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
    (1023, "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11"),
    (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
    (1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"),
    (5121, "628bd2cb2004694adaab7bbd778a25df25c47b9d4155a55f8fbd79f2fe154cff"),
    (102_400, "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085"),
];

#[test]
fn blake3_digest_gives_the_official_vectors() {
    for (len, expected) in OFFICIAL {
        assert_eq!(hex(blake3_digest(&official_input(len))), expected, "of {len} bytes");
    }
    assert_eq!(hex(blake3_digest(b"abc")), "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
}

#[test]
fn the_twin_gives_the_official_vectors() {
    for (len, expected) in OFFICIAL {
        assert_eq!(hex(twin::digest(&official_input(len))), expected, "of {len} bytes");
    }
}

#[test]
fn no_parts_have_the_digest_of_nothing() {
    assert_eq!(blake3_digest_parts([]), blake3_digest(b""));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn blake3_digest_is_its_recursive_twin(data in vec(any::<u8>(), 0..MAX_BYTES)) {
        prop_assert_eq!(blake3_digest(&data), twin::digest(&data));
    }

    #[test]
    fn blake3_digest_parts_is_the_digest_of_any_split(data in vec(any::<u8>(), 0..MAX_BYTES), cut: Index) {
        let (head, tail) = data.split_at(cut.index(data.len() + 1));
        prop_assert_eq!(blake3_digest_parts([head, tail]), twin::digest(&data));
    }

    #[test]
    fn blake3_digest_parts_is_the_digest_of_the_joined_parts(parts in vec(vec(any::<u8>(), 0..3000), 0..8)) {
        prop_assert_eq!(blake3_digest_parts(parts.iter().map(Vec::as_slice)), twin::digest(&parts.concat()));
    }
}

/// The slow, obvious twin: the definition of BLAKE3 (section 2 of its paper) as a recursion over the tree.
mod twin {
    type Words = [u32; 8];

    const BLOCK_BYTES: usize = 64;
    const CHUNK_BYTES: usize = 1024;
    const CHUNK_START: u32 = 1;
    const CHUNK_END: u32 = 2;
    const PARENT: u32 = 4;
    const ROOT: u32 = 8;
    const IV: Words =
        [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A, 0x510E_527F, 0x9B05_688C, 0x1F83_D9AB, 0x5BE0_CD19];
    const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];

    pub fn digest(data: &[u8]) -> [u8; 32] {
        let mut bytes = [0; 32];
        for (four, word) in bytes.chunks_exact_mut(4).zip(subtree(data, 0, ROOT)) {
            four.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// A single chunk, or two subtrees: the left one has the largest power of two of chunks that leaves a rest, the
    /// right one the rest.
    fn subtree(data: &[u8], first_chunk: usize, flags: u32) -> Words {
        if data.len() <= CHUNK_BYTES {
            return chunk(data, first_chunk, flags);
        }
        let left_chunks = data.len().div_ceil(CHUNK_BYTES).next_power_of_two() / 2;
        let (left, right) = data.split_at(left_chunks * CHUNK_BYTES);
        let children = [subtree(left, first_chunk, 0), subtree(right, first_chunk + left_chunks, 0)].concat();
        compress(IV, children.try_into().unwrap(), 0, as_u32(BLOCK_BYTES), flags | PARENT)
    }

    fn chunk(data: &[u8], number: usize, flags: u32) -> Words {
        let blocks: Vec<&[u8]> = if data.is_empty() { vec![data] } else { data.chunks(BLOCK_BYTES).collect() };
        let last = blocks.len() - 1;
        blocks.iter().enumerate().fold(IV, |chaining, (at, block)| {
            let start = if at == 0 { CHUNK_START } else { 0 };
            let end = if at == last { CHUNK_END | flags } else { 0 };
            compress(chaining, words(block), as_u32(number), as_u32(block.len()), start | end)
        })
    }

    fn words(block: &[u8]) -> [u32; 16] {
        let mut padded = [0; BLOCK_BYTES];
        padded[..block.len()].copy_from_slice(block);
        std::array::from_fn(|i| u32::from_le_bytes(padded[4 * i..4 * i + 4].try_into().unwrap()))
    }

    fn compress(chaining: Words, mut message: [u32; 16], counter: u32, block_bytes: u32, flags: u32) -> Words {
        let tail = [IV[0], IV[1], IV[2], IV[3], counter, 0, block_bytes, flags];
        let mut state: [u32; 16] = [chaining, tail].concat().try_into().unwrap();
        for _ in 0..7 {
            for column in 0..4 {
                mix(&mut state, [0, 4, 8, 12].map(|row| row + column), &message[2 * column..]);
            }
            for diagonal in 0..4 {
                let at = [0, 1, 2, 3].map(|row| 4 * row + (diagonal + row) % 4);
                mix(&mut state, at, &message[8 + 2 * diagonal..]);
            }
            message = PERMUTATION.map(|from| message[from]);
        }
        std::array::from_fn(|i| state[i] ^ state[i + 8])
    }

    fn as_u32(count: usize) -> u32 {
        u32::try_from(count).expect("no test hashes 4 TiB")
    }

    fn mix(state: &mut [u32; 16], [a, b, c, d]: [usize; 4], message: &[u32]) {
        for (word, turn_d, turn_b) in [(message[0], 16, 12), (message[1], 8, 7)] {
            state[a] = state[a].wrapping_add(state[b]).wrapping_add(word);
            state[d] = (state[d] ^ state[a]).rotate_right(turn_d);
            state[c] = state[c].wrapping_add(state[d]);
            state[b] = (state[b] ^ state[c]).rotate_right(turn_b);
        }
    }
}

//! The protocols over streams: those that this peer serves, and those that it uses on command.

use std::error::Error;
use std::time::Instant;

use futures::{AsyncReadExt, AsyncWriteExt, StreamExt};
use libp2p::{PeerId, StreamProtocol};
use libp2p_stream::Control;
use sha2::{Digest, Sha256};

/// A length in 4 bytes, and that number of bytes: the same comes back.
const ECHO: StreamProtocol = StreamProtocol::new("/llmnode-test/echo/1");
/// A length in 8 bytes, and that number of bytes: one byte comes back.
const SINK: StreamProtocol = StreamProtocol::new("/llmnode-test/sink/1");
/// Like sink, but their SHA-256 comes back.
const DIGEST: StreamProtocol = StreamProtocol::new("/llmnode-test/digest/1");
/// A length in 8 bytes: that number of bytes comes back.
const SOURCE: StreamProtocol = StreamProtocol::new("/llmnode-test/source/1");
const BLOCK_BYTES: usize = 1 << 20;

pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;
type Stream = libp2p::Stream;

// The protocols that it serves

/// Serves each protocol to every peer that asks.
pub fn serve_all(control: &Control) -> Result<()> {
    for protocol in [ECHO, SINK, DIGEST, SOURCE] {
        let mut arriving = control.clone().accept(protocol.clone())?;
        tokio::spawn(async move {
            while let Some((_, stream)) = arriving.next().await {
                tokio::spawn(serve(stream, protocol.clone()));
            }
        });
    }
    Ok(())
}

async fn serve(mut stream: Stream, protocol: StreamProtocol) {
    while serve_once(&mut stream, &protocol).await.is_ok() {}
    let _ = stream.close().await;
}

async fn serve_once(stream: &mut Stream, protocol: &StreamProtocol) -> Result<()> {
    if *protocol == ECHO {
        let mut length = [0; 4];
        stream.read_exact(&mut length).await?;
        let mut message = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut message).await?;
        stream.write_all(&length).await?;
        stream.write_all(&message).await?;
    } else if *protocol == SOURCE {
        let mut length = [0; 8];
        stream.read_exact(&mut length).await?;
        give(stream, u64::from_be_bytes(length) as usize, None).await?;
    } else {
        let digest = take(stream).await?;
        stream.write_all(if *protocol == DIGEST { &digest } else { &[1] }).await?;
    }
    Ok(stream.flush().await?)
}

async fn take(stream: &mut Stream) -> Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length).await?;
    let (mut left, mut block, mut digest) = (u64::from_be_bytes(length) as usize, vec![0; BLOCK_BYTES], Sha256::new());
    while left > 0 {
        let most = left.min(BLOCK_BYTES);
        let count = stream.read(&mut block[..most]).await?;
        if count == 0 {
            return Err("the stream ended too soon".into());
        }
        digest.update(&block[..count]);
        left -= count;
    }
    Ok(digest.finalize().to_vec())
}

async fn give(stream: &mut Stream, bytes: usize, mut digest: Option<&mut Sha256>) -> Result<()> {
    let block: Vec<u8> = (0..BLOCK_BYTES).map(|at| (at * at / 7) as u8).collect();
    let mut left = bytes;
    while left > 0 {
        let part = &block[..left.min(BLOCK_BYTES)];
        stream.write_all(part).await?;
        if let Some(digest) = digest.as_deref_mut() {
            digest.update(part);
        }
        left -= part.len();
    }
    Ok(stream.flush().await?)
}

// The orders that it obeys

/// How long each took that had a stream of its own.
pub async fn open_repeatedly(control: &Control, peer: PeerId, bytes: usize, repeats: usize) -> Result<Vec<f64>> {
    let mut took = Vec::new();
    for _ in 0..repeats {
        let began = Instant::now();
        let mut stream = open(control, peer, ECHO).await?;
        echo(&mut stream, bytes).await?;
        stream.close().await?;
        took.push(began.elapsed().as_secs_f64());
    }
    Ok(took)
}

/// How long each took, over one stream.
pub async fn echo_repeatedly(control: &Control, peer: PeerId, bytes: usize, repeats: usize) -> Result<Vec<f64>> {
    let (mut stream, mut took) = (open(control, peer, ECHO).await?, Vec::new());
    for _ in 0..repeats {
        let began = Instant::now();
        echo(&mut stream, bytes).await?;
        took.push(began.elapsed().as_secs_f64());
    }
    stream.close().await?;
    Ok(took)
}

async fn open(control: &Control, peer: PeerId, protocol: StreamProtocol) -> Result<Stream> {
    Ok(control.clone().open_stream(peer, protocol).await.map_err(|error| error.to_string())?)
}

async fn echo(stream: &mut Stream, bytes: usize) -> Result<()> {
    let mut message = u32::try_from(bytes)?.to_be_bytes().to_vec();
    message.resize(4 + bytes, 0);
    stream.write_all(&message).await?;
    stream.flush().await?;
    Ok(stream.read_exact(&mut message).await?)
}

pub async fn send(control: &Control, peer: PeerId, bytes: usize, check: bool) -> Result<()> {
    let mut stream = open(control, peer, if check { DIGEST } else { SINK }).await?;
    let mut digest = Sha256::new();
    stream.write_all(&(bytes as u64).to_be_bytes()).await?;
    give(&mut stream, bytes, check.then_some(&mut digest)).await?;
    let mut theirs = vec![0; if check { 32 } else { 1 }];
    stream.read_exact(&mut theirs).await?;
    if check && theirs != digest.finalize().as_slice() {
        return Err("they got something else".into());
    }
    Ok(stream.close().await?)
}

pub async fn receive(control: &Control, peer: PeerId, bytes: usize) -> Result<()> {
    let mut stream = open(control, peer, SOURCE).await?;
    stream.write_all(&(bytes as u64).to_be_bytes()).await?;
    stream.flush().await?;
    let (mut left, mut block) = (bytes, vec![0; BLOCK_BYTES]);
    while left > 0 {
        let most = left.min(BLOCK_BYTES);
        let count = stream.read(&mut block[..most]).await?;
        if count == 0 {
            return Err("the stream ended too soon".into());
        }
        left -= count;
    }
    Ok(stream.close().await?)
}

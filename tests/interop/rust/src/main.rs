//! A rust-libp2p peer for the interop tests: TCP, Noise and yamux alone.
//!
//! It says on stdout where it listens, then does what it is told on stdin; a JSON object a line, both ways. It ends with
//! its stdin.

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use futures::{AsyncReadExt, AsyncWriteExt, StreamExt};
use libp2p::swarm::{NetworkBehaviour, SwarmEvent};
use libp2p::{Multiaddr, PeerId, StreamProtocol, Swarm, identify, noise, ping, tcp, yamux};
use libp2p_stream::Control;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::AsyncBufReadExt;
use tokio::sync::{mpsc, oneshot};

/// A length of 4 bytes and as many bytes: the same back.
const ECHO: StreamProtocol = StreamProtocol::new("/llmnode-test/echo/1");
/// A length of 8 bytes and as many bytes: one byte back.
const SINK: StreamProtocol = StreamProtocol::new("/llmnode-test/sink/1");
/// As sink, but their SHA-256 back.
const DIGEST: StreamProtocol = StreamProtocol::new("/llmnode-test/digest/1");
/// A length of 8 bytes: as many bytes back.
const SOURCE: StreamProtocol = StreamProtocol::new("/llmnode-test/source/1");
const BLOCK_BYTES: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(300);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;
type Stream = libp2p::Stream;

#[derive(NetworkBehaviour)]
struct Behaviour {
    identify: identify::Behaviour,
    ping: ping::Behaviour,
    stream: libp2p_stream::Behaviour,
}

#[derive(Clone, Deserialize)]
#[serde(default)]
struct Order {
    #[serde(rename = "do")]
    what: String,
    address: String,
    peer: String,
    bytes: usize,
    repeats: usize,
    streams: usize,
    check: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self {
            what: String::new(),
            address: String::new(),
            peer: String::new(),
            bytes: 0,
            repeats: 1,
            streams: 1,
            check: false,
        }
    }
}

/// What only the task that owns the swarm can do, and where its answer goes.
enum Request {
    Connect(Multiaddr, oneshot::Sender<Result<()>>),
    Disconnect(PeerId, oneshot::Sender<()>),
    /// The protocols that a peer says it speaks, once it has said so.
    Identify(PeerId, oneshot::Sender<Vec<String>>),
    /// The next round trip that is measured.
    Ping(PeerId, oneshot::Sender<f64>),
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut swarm = libp2p::SwarmBuilder::with_new_identity()
        .with_tokio()
        .with_tcp(tcp::Config::default(), noise::Config::new, yamux::Config::default)?
        .with_behaviour(|key| Behaviour {
            identify: identify::Behaviour::new(identify::Config::new("/llmnode-test".to_owned(), key.public())),
            ping: ping::Behaviour::new(ping::Config::new().with_interval(Duration::from_millis(100))),
            stream: libp2p_stream::Behaviour::new(),
        })?
        .with_swarm_config(|config| config.with_idle_connection_timeout(PATIENCE))
        .build();
    swarm.listen_on("/ip4/127.0.0.1/tcp/0".parse()?)?;
    let peer = *swarm.local_peer_id();
    let address = loop {
        if let SwarmEvent::NewListenAddr { address, .. } = swarm.select_next_some().await {
            break address;
        }
    };
    let control = swarm.behaviour().stream.new_control();
    for protocol in [ECHO, SINK, DIGEST, SOURCE] {
        let mut arriving = control.clone().accept(protocol.clone())?;
        tokio::spawn(async move {
            while let Some((_, stream)) = arriving.next().await {
                tokio::spawn(serve(stream, protocol.clone()));
            }
        });
    }
    let (requests, told) = mpsc::channel(8);
    tokio::spawn(drive(swarm, told));
    println!("{}", json!({"address": format!("{address}/p2p/{peer}"), "peer": peer.to_string()}));
    let mut orders = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = orders.next_line().await? {
        let answer = match tokio::time::timeout(PATIENCE, obey(&line, &requests, &control)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => json!({"error": error.to_string()}),
            Err(late) => json!({"error": late.to_string()}),
        };
        println!("{answer}");
    }
    Ok(())
}

/// Owns the swarm: nothing happens to its connections but here.
async fn drive(mut swarm: Swarm<Behaviour>, mut told: mpsc::Receiver<Request>) {
    let mut dialled: HashMap<PeerId, oneshot::Sender<Result<()>>> = HashMap::new();
    let mut left: HashMap<PeerId, oneshot::Sender<()>> = HashMap::new();
    let mut asked: HashMap<PeerId, oneshot::Sender<Vec<String>>> = HashMap::new();
    let mut pinged: HashMap<PeerId, oneshot::Sender<f64>> = HashMap::new();
    let mut identified: HashMap<PeerId, Vec<String>> = HashMap::new();
    loop {
        tokio::select! {
            request = told.recv() => match request {
                None => return,
                Some(Request::Connect(address, answer)) => {
                    let peer = address.iter().find_map(|part| match part {
                        libp2p::multiaddr::Protocol::P2p(peer) => Some(peer),
                        _ => None,
                    });
                    match (peer, swarm.dial(address)) {
                        (Some(peer), Ok(())) => drop(dialled.insert(peer, answer)),
                        (None, _) => drop(answer.send(Err("the address names no peer".into()))),
                        (_, Err(error)) => drop(answer.send(Err(error.into()))),
                    }
                }
                Some(Request::Disconnect(peer, answer)) => {
                    if swarm.disconnect_peer_id(peer).is_ok() {
                        left.insert(peer, answer);
                    } else {
                        let _ = answer.send(());
                    }
                }
                Some(Request::Identify(peer, answer)) => match identified.get(&peer) {
                    Some(protocols) => drop(answer.send(protocols.clone())),
                    None => drop(asked.insert(peer, answer)),
                },
                Some(Request::Ping(peer, answer)) => drop(pinged.insert(peer, answer)),
            },
            event = swarm.select_next_some() => match event {
                SwarmEvent::ConnectionEstablished { peer_id, .. } => {
                    if let Some(answer) = dialled.remove(&peer_id) {
                        let _ = answer.send(Ok(()));
                    }
                }
                SwarmEvent::OutgoingConnectionError { peer_id: Some(peer), error, .. } => {
                    if let Some(answer) = dialled.remove(&peer) {
                        let _ = answer.send(Err(error.into()));
                    }
                }
                SwarmEvent::ConnectionClosed { peer_id, .. } => {
                    if let Some(answer) = left.remove(&peer_id) {
                        let _ = answer.send(());
                    }
                }
                SwarmEvent::Behaviour(BehaviourEvent::Identify(identify::Event::Received { peer_id, info, .. })) => {
                    let protocols: Vec<String> = info.protocols.iter().map(ToString::to_string).collect();
                    if let Some(answer) = asked.remove(&peer_id) {
                        let _ = answer.send(protocols.clone());
                    }
                    identified.insert(peer_id, protocols);
                }
                SwarmEvent::Behaviour(BehaviourEvent::Ping(ping::Event { peer, result: Ok(took), .. })) => {
                    if let Some(answer) = pinged.remove(&peer) {
                        let _ = answer.send(took.as_secs_f64());
                    }
                }
                _ => {}
            },
        }
    }
}

// What it serves

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
    let (mut left, mut block, mut digest) =
        (u64::from_be_bytes(length) as usize, vec![0; BLOCK_BYTES], Sha256::new());
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

// What it does when it is told to

async fn obey(line: &str, requests: &mpsc::Sender<Request>, control: &Control) -> Result<Value> {
    let told: Order = serde_json::from_str(line)?;
    if told.what == "connect" {
        let (answer, connected) = oneshot::channel();
        let began = Instant::now();
        requests.send(Request::Connect(told.address.parse()?, answer)).await?;
        connected.await??;
        return Ok(json!({"seconds": began.elapsed().as_secs_f64()}));
    }
    let peer: PeerId = told.peer.parse()?;
    match told.what.as_str() {
        "disconnect" => {
            let (answer, gone) = oneshot::channel();
            requests.send(Request::Disconnect(peer, answer)).await?;
            gone.await?;
            Ok(json!({}))
        }
        "identify" => {
            let (answer, protocols) = oneshot::channel();
            requests.send(Request::Identify(peer, answer)).await?;
            Ok(json!({"protocols": protocols.await?}))
        }
        "ping" => {
            let (answer, took) = oneshot::channel();
            requests.send(Request::Ping(peer, answer)).await?;
            Ok(json!({"seconds": took.await?}))
        }
        "open" => {
            let mut took = Vec::new();
            for _ in 0..told.repeats {
                let began = Instant::now();
                let mut stream = open(control, peer, ECHO).await?;
                echo(&mut stream, told.bytes).await?;
                stream.close().await?;
                took.push(began.elapsed().as_secs_f64());
            }
            Ok(json!({"seconds": took}))
        }
        "echo" => {
            let (mut stream, mut took) = (open(control, peer, ECHO).await?, Vec::new());
            for _ in 0..told.repeats {
                let began = Instant::now();
                echo(&mut stream, told.bytes).await?;
                took.push(began.elapsed().as_secs_f64());
            }
            stream.close().await?;
            Ok(json!({"seconds": took}))
        }
        "send" => {
            let began = Instant::now();
            try_join_all((0..told.streams).map(|_| send(control, peer, &told))).await?;
            Ok(json!({"seconds": began.elapsed().as_secs_f64()}))
        }
        "receive" => {
            let began = Instant::now();
            try_join_all((0..told.streams).map(|_| receive(control, peer, told.bytes))).await?;
            Ok(json!({"seconds": began.elapsed().as_secs_f64()}))
        }
        unknown => Err(format!("unknown order {unknown:?}").into()),
    }
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

async fn send(control: &Control, peer: PeerId, told: &Order) -> Result<()> {
    let mut stream = open(control, peer, if told.check { DIGEST } else { SINK }).await?;
    let mut digest = Sha256::new();
    stream.write_all(&(told.bytes as u64).to_be_bytes()).await?;
    give(&mut stream, told.bytes, told.check.then_some(&mut digest)).await?;
    let mut theirs = vec![0; if told.check { 32 } else { 1 }];
    stream.read_exact(&mut theirs).await?;
    if told.check && theirs != digest.finalize().as_slice() {
        return Err("they got something else".into());
    }
    Ok(stream.close().await?)
}

async fn receive(control: &Control, peer: PeerId, bytes: usize) -> Result<()> {
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

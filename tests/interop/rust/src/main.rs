//! A rust-libp2p peer for the interop tests: TCP, Noise and yamux alone.
//!
//! It says on stdout where it listens, then does what it is told on stdin; a JSON object a line, both ways. It ends with
//! its stdin. With the argument "relay" it is a circuit relay too, with "dht" a server of our DHT.

mod dht;
mod streams;
mod swarm;

use std::time::{Duration, Instant};

use futures::future::try_join_all;
use libp2p::PeerId;
use libp2p::identity::Keypair;
use libp2p_stream::Control;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt;
use tokio::sync::{mpsc, oneshot};

use crate::dht::{Query, hex, unhex};
use crate::streams::{Result, echo_repeatedly, open_repeatedly, receive, send, serve_all};
use crate::swarm::{Request, Roles, drive, listening};

const PATIENCE: Duration = Duration::from_secs(300);

#[derive(Default, Deserialize)]
#[serde(default)]
struct Order {
    #[serde(rename = "do")]
    what: String,
    address: String,
    peer: String,
    bytes: usize,
    #[serde(default = "one")]
    repeats: usize,
    #[serde(default = "one")]
    streams: usize,
    check: bool,
    key: String,
    value: String,
}

fn one() -> usize {
    1
}

#[tokio::main]
async fn main() -> Result<()> {
    let is = |role| std::env::args().any(|argument| argument == role);
    let keys = Keypair::generate_ed25519();
    let (swarm, address) = listening(keys.clone(), Roles { relay: is("relay"), dht: is("dht") }).await?;
    let (peer, control) = (*swarm.local_peer_id(), swarm.behaviour().stream.new_control());
    serve_all(&control)?;
    let (requests, told) = mpsc::channel(8);
    tokio::spawn(drive(swarm, told));
    println!("{}", json!({"address": format!("{address}/p2p/{peer}"), "peer": peer.to_string()}));
    let mut orders = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = orders.next_line().await? {
        let answer = match tokio::time::timeout(PATIENCE, obey(&line, &keys, &requests, &control)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => json!({"error": error.to_string()}),
            Err(late) => json!({"error": late.to_string()}),
        };
        println!("{answer}");
    }
    Ok(())
}

async fn obey(line: &str, keys: &Keypair, requests: &mpsc::Sender<Request>, control: &Control) -> Result<Value> {
    let told: Order = serde_json::from_str(line)?;
    let began = Instant::now();
    match told.what.as_str() {
        "connect" => {
            ask(requests, |answer| Ok(Request::Connect(told.address.parse()?, answer))).await??;
            return Ok(json!({"seconds": began.elapsed().as_secs_f64()}));
        }
        "reserve" => {
            let reserve = ask(requests, |answer| Ok(Request::Reserve(told.address.parse()?, answer)));
            return Ok(json!({"addresses": reserve.await??}));
        }
        "sign" => return Ok(json!({"value": hex(&keys.sign(&unhex(&told.value)?)?)})),
        "put" => return query(requests, Query::Put(unhex(&told.key)?, unhex(&told.value)?)).await,
        "get" => return query(requests, Query::Get(unhex(&told.key)?)).await,
        "provide" => return query(requests, Query::Provide(unhex(&told.key)?)).await,
        "providers" => return query(requests, Query::Providers(unhex(&told.key)?)).await,
        _ => {}
    }
    let peer: PeerId = told.peer.parse()?;
    match told.what.as_str() {
        "disconnect" => {
            ask(requests, |answer| Ok(Request::Disconnect(peer, answer))).await?;
            Ok(json!({}))
        }
        "identify" => {
            let protocols = ask(requests, |answer| Ok(Request::Identify(peer, answer))).await?;
            Ok(json!({"protocols": protocols}))
        }
        "find" => query(requests, Query::Find(peer)).await,
        "ping" => Ok(json!({"seconds": ask(requests, |answer| Ok(Request::Ping(peer, answer))).await?})),
        "open" => Ok(json!({"seconds": open_repeatedly(control, peer, told.bytes, told.repeats).await?})),
        "echo" => Ok(json!({"seconds": echo_repeatedly(control, peer, told.bytes, told.repeats).await?})),
        "send" => {
            try_join_all((0..told.streams).map(|_| send(control, peer, told.bytes, told.check))).await?;
            Ok(json!({"seconds": began.elapsed().as_secs_f64()}))
        }
        "receive" => {
            try_join_all((0..told.streams).map(|_| receive(control, peer, told.bytes))).await?;
            Ok(json!({"seconds": began.elapsed().as_secs_f64()}))
        }
        unknown => Err(format!("unknown order {unknown:?}").into()),
    }
}

async fn query(requests: &mpsc::Sender<Request>, query: Query) -> Result<Value> {
    ask(requests, |answer| Ok(Request::Query(query, answer))).await?
}

/// Answers of the task that owns the swarm.
async fn ask<T>(
    requests: &mpsc::Sender<Request>,
    request: impl FnOnce(oneshot::Sender<T>) -> Result<Request>,
) -> Result<T> {
    let (answer, answered) = oneshot::channel();
    requests.send(request(answer)?).await?;
    Ok(answered.await?)
}

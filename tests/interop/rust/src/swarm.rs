//! The task that owns the swarm: nothing happens to its connections but here.

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt;
use libp2p::core::transport::ListenerId;
use libp2p::kad::store::MemoryStore;
use libp2p::multiaddr::Protocol;
use libp2p::swarm::behaviour::toggle::Toggle;
use libp2p::swarm::{NetworkBehaviour, SwarmEvent};
use libp2p::{Multiaddr, PeerId, Swarm, identify, identity, kad, noise, ping, relay, tcp, yamux};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::PATIENCE;
use crate::dht::{self, Queries, Query};
use crate::streams::Result;

#[derive(NetworkBehaviour)]
pub struct Behaviour {
    identify: identify::Behaviour,
    ping: ping::Behaviour,
    pub stream: libp2p_stream::Behaviour,
    circuits: relay::client::Behaviour,
    relay: Toggle<relay::Behaviour>,
    dht: Toggle<kad::Behaviour<MemoryStore>>,
}

/// Commands that only this task can do, and the channel for the answer.
pub enum Request {
    Connect(Multiaddr, oneshot::Sender<Result<()>>),
    Disconnect(PeerId, oneshot::Sender<()>),
    /// Have a relay connect others with us: its addresses, of which it says that others reach it there.
    Reserve(Multiaddr, oneshot::Sender<Result<Vec<String>>>),
    /// The protocols that a peer says it speaks, once it has said so.
    Identify(PeerId, oneshot::Sender<Vec<String>>),
    /// The next round trip that is measured.
    Ping(PeerId, oneshot::Sender<f64>),
    Query(Query, oneshot::Sender<Result<Value>>),
}

/// The other roles of this peer.
#[derive(Clone, Copy)]
pub struct Roles {
    /// A circuit relay.
    pub relay: bool,
    /// A server of our DHT.
    pub dht: bool,
}

/// One that listens, and where.
pub async fn listening(keys: identity::Keypair, roles: Roles) -> Result<(Swarm<Behaviour>, Multiaddr)> {
    let mut swarm = libp2p::SwarmBuilder::with_existing_identity(keys)
        .with_tokio()
        .with_tcp(tcp::Config::default(), noise::Config::new, yamux::Config::default)?
        .with_relay_client(noise::Config::new, yamux::Config::default)?
        .with_behaviour(|key, circuits| behaviour(key, circuits, roles))?
        .with_swarm_config(|config| config.with_idle_connection_timeout(PATIENCE))
        .build();
    swarm.listen_on("/ip4/127.0.0.1/tcp/0".parse()?)?;
    loop {
        if let SwarmEvent::NewListenAddr { address, .. } = swarm.select_next_some().await {
            swarm.add_external_address(address.clone()); // a relay names these alone to who reserves
            return Ok((swarm, address));
        }
    }
}

fn behaviour(key: &identity::Keypair, circuits: relay::client::Behaviour, roles: Roles) -> Behaviour {
    let peer = key.public().to_peer_id();
    // By default a circuit carries 128 KiB, for two minutes.
    let limits = relay::Config { max_circuit_bytes: 1 << 30, max_circuit_duration: PATIENCE, ..Default::default() };
    Behaviour {
        identify: identify::Behaviour::new(identify::Config::new("/llmnode-test".to_owned(), key.public())),
        ping: ping::Behaviour::new(ping::Config::new().with_interval(Duration::from_millis(100))),
        stream: libp2p_stream::Behaviour::new(),
        circuits,
        relay: roles.relay.then(|| relay::Behaviour::new(peer, limits)).into(),
        dht: roles.dht.then(|| dht::behaviour(peer)).into(),
    }
}

/// Does what it is asked until nobody can ask any more.
pub async fn drive(mut swarm: Swarm<Behaviour>, mut told: mpsc::Receiver<Request>) {
    let mut waiting = Waiting::default();
    loop {
        tokio::select! {
            request = told.recv() => match request {
                None => return,
                Some(request) => waiting.ask(&mut swarm, request),
            },
            event = swarm.select_next_some() => waiting.hear(&mut swarm, event),
        }
    }
}

/// The callers whose events have not happened yet.
#[derive(Default)]
struct Waiting {
    dialled: HashMap<PeerId, oneshot::Sender<Result<()>>>,
    left: HashMap<PeerId, oneshot::Sender<()>>,
    reserved: HashMap<ListenerId, oneshot::Sender<Result<Vec<String>>>>,
    asked: HashMap<PeerId, oneshot::Sender<Vec<String>>>,
    pinged: HashMap<PeerId, oneshot::Sender<f64>>,
    /// Events that may come more than once.
    identified: HashMap<PeerId, Vec<String>>,
    queries: Queries,
}

impl Waiting {
    fn ask(&mut self, swarm: &mut Swarm<Behaviour>, request: Request) {
        match request {
            Request::Connect(address, answer) => match (last_peer(&address), swarm.dial(address)) {
                (Some(peer), Ok(())) => drop(self.dialled.insert(peer, answer)),
                (None, _) => drop(answer.send(Err("the address names no peer".into()))),
                (_, Err(error)) => drop(answer.send(Err(error.into()))),
            },
            Request::Disconnect(peer, answer) => {
                if swarm.disconnect_peer_id(peer).is_ok() {
                    self.left.insert(peer, answer);
                } else {
                    let _ = answer.send(());
                }
            }
            Request::Reserve(relay, answer) => match swarm.listen_on(relay.with(Protocol::P2pCircuit)) {
                Ok(listener) => drop(self.reserved.insert(listener, answer)),
                Err(error) => drop(answer.send(Err(error.into()))),
            },
            Request::Identify(peer, answer) => match self.identified.get(&peer) {
                Some(protocols) => drop(answer.send(protocols.clone())),
                None => drop(self.asked.insert(peer, answer)),
            },
            Request::Ping(peer, answer) => drop(self.pinged.insert(peer, answer)),
            Request::Query(query, answer) => match swarm.behaviour_mut().dht.as_mut() {
                Some(table) => self.queries.ask(table, query, answer),
                None => drop(answer.send(Err("it takes no part in the DHT".into()))),
            },
        }
    }

    fn hear(&mut self, swarm: &mut Swarm<Behaviour>, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::ConnectionEstablished { peer_id, .. } => {
                if let Some(answer) = self.dialled.remove(&peer_id) {
                    let _ = answer.send(Ok(()));
                }
            }
            SwarmEvent::OutgoingConnectionError { peer_id: Some(peer), error, .. } => {
                if let Some(answer) = self.dialled.remove(&peer) {
                    let _ = answer.send(Err(error.into()));
                }
            }
            SwarmEvent::ConnectionClosed { peer_id, .. } => {
                if let Some(answer) = self.left.remove(&peer_id) {
                    let _ = answer.send(());
                }
            }
            SwarmEvent::NewListenAddr { listener_id, address } => {
                if let Some(answer) = self.reserved.remove(&listener_id) {
                    let relay = address.iter().take_while(|part| *part != Protocol::P2pCircuit);
                    let _ = answer.send(Ok(vec![relay.collect::<Multiaddr>().to_string()]));
                }
            }
            SwarmEvent::ListenerClosed { listener_id, reason, .. } => {
                if let Some(answer) = self.reserved.remove(&listener_id) {
                    let _ = answer.send(Err(format!("the relay does not reserve ({reason:?})").into()));
                }
            }
            SwarmEvent::Behaviour(event) => self.hear_behaviour(swarm, event),
            _ => {}
        }
    }

    fn hear_behaviour(&mut self, swarm: &mut Swarm<Behaviour>, event: BehaviourEvent) {
        match event {
            BehaviourEvent::Identify(identify::Event::Received { peer_id, info, .. }) => {
                if let Some(table) = swarm.behaviour_mut().dht.as_mut() {
                    dht::add(table, peer_id, &info.listen_addrs);
                }
                let protocols: Vec<String> = info.protocols.iter().map(ToString::to_string).collect();
                if let Some(answer) = self.asked.remove(&peer_id) {
                    let _ = answer.send(protocols.clone());
                }
                self.identified.insert(peer_id, protocols);
            }
            BehaviourEvent::Ping(ping::Event { peer, result: Ok(took), .. }) => {
                if let Some(answer) = self.pinged.remove(&peer) {
                    let _ = answer.send(took.as_secs_f64());
                }
            }
            BehaviourEvent::Dht(event) => self.queries.hear(event),
            _ => {}
        }
    }
}

/// The peer at the end of an address; the relay on the way comes before it.
fn last_peer(address: &Multiaddr) -> Option<PeerId> {
    address.iter().filter_map(|part| if let Protocol::P2p(peer) = part { Some(peer) } else { None }).last()
}

//! Our DHT, in which a peer takes part as a server: what it is told to do there, and what came of it.

use std::collections::{BTreeSet, HashMap};

use libp2p::kad::store::MemoryStore;
use libp2p::kad::{self, GetProvidersOk, GetRecordOk, QueryId, QueryResult, Quorum, Record};
use libp2p::{Multiaddr, PeerId};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::streams::Result;

/// Keys are bytes: of a record, and of what somebody provides, which is a multihash.
pub enum Query {
    Put(Vec<u8>, Vec<u8>),
    Get(Vec<u8>),
    Provide(Vec<u8>),
    Providers(Vec<u8>),
    Find(PeerId),
}

pub fn behaviour(peer: PeerId) -> kad::Behaviour<MemoryStore> {
    // Its own protocol is /ipfs/kad/1.0.0, as our nodes speak among themselves: py-libp2p has no other.
    let mut table = kad::Behaviour::new(peer, MemoryStore::new(peer));
    table.set_mode(Some(kad::Mode::Server));
    table
}

#[derive(Default)]
pub struct Queries {
    asked: HashMap<QueryId, (oneshot::Sender<Result<Value>>, BTreeSet<String>)>,
}

impl Queries {
    pub fn ask(
        &mut self,
        table: &mut kad::Behaviour<MemoryStore>,
        query: Query,
        answer: oneshot::Sender<Result<Value>>,
    ) {
        let begun = match query {
            Query::Put(key, value) => {
                table.put_record(Record::new(key, value), Quorum::One).map_err(|error| error.to_string())
            }
            Query::Provide(key) => table.start_providing(key.into()).map_err(|error| error.to_string()),
            Query::Get(key) => Ok(table.get_record(key.into())),
            Query::Providers(key) => Ok(table.get_providers(key.into())),
            Query::Find(peer) => Ok(table.get_closest_peers(peer)),
        };
        match begun {
            Ok(query) => drop(self.asked.insert(query, (answer, BTreeSet::new()))),
            Err(error) => drop(answer.send(Err(error.into()))),
        }
    }

    /// The answer goes to the task that asked when there is nothing more to come, and a record as soon as there is one.
    pub fn hear(&mut self, event: kad::Event) {
        let kad::Event::OutboundQueryProgressed { id, result, step, .. } = event else { return };
        let Some((_, peers)) = self.asked.get_mut(&id) else { return };
        let answer = match result {
            QueryResult::GetRecord(Ok(GetRecordOk::FoundRecord(found))) => Ok(json!({"value": hex(&found.record.value)})),
            QueryResult::GetRecord(Ok(_)) => Err("there is no such record".into()),
            QueryResult::GetRecord(Err(error)) => Err(error.into()),
            QueryResult::PutRecord(put) => put.map(|_| json!({})).map_err(Into::into),
            QueryResult::StartProviding(begun) => begun.map(|_| json!({})).map_err(Into::into),
            QueryResult::GetProviders(Ok(found)) => {
                if let GetProvidersOk::FoundProviders { providers, .. } = found {
                    peers.extend(providers.iter().map(ToString::to_string));
                }
                if !step.last {
                    return;
                }
                Ok(json!({"peers": peers}))
            }
            QueryResult::GetProviders(Err(error)) => Err(error.into()),
            QueryResult::GetClosestPeers(found) => found
                .map(|found| json!({"peers": found.peers.iter().map(|each| each.peer_id.to_string()).collect::<Vec<_>>()}))
                .map_err(Into::into),
            _ => return,
        };
        if let Some((asked, _)) = self.asked.remove(&id) {
            let _ = asked.send(answer);
        }
    }
}

/// A peer of the DHT, where it says that it listens.
pub fn add(table: &mut kad::Behaviour<MemoryStore>, peer: PeerId, addresses: &[Multiaddr]) {
    for address in addresses {
        table.add_address(&peer, address.clone());
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Result<Vec<u8>> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|two| Ok(u8::from_str_radix(std::str::from_utf8(two)?, 16)?)).collect()
}

package main

import (
	"context"
	"encoding/hex"
	"time"

	"github.com/ipfs/go-cid"
	dht "github.com/libp2p/go-libp2p-kad-dht"
	record "github.com/libp2p/go-libp2p-record"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
)

const kadProtocol = protocol.ID("/ipfs/kad/1.0.0") // as our nodes speak, among themselves: py-libp2p has no other

// newDHT takes part in our DHT as a server. Under a prefix other than go-libp2p's own it may keep our records.
func newDHT(ctx context.Context, node host.Host) (*dht.IpfsDHT, error) {
	return dht.New(ctx, node,
		dht.Mode(dht.ModeServer),
		dht.ProtocolPrefix("/llmnode"),
		dht.V1ProtocolOverride(kadProtocol),
		dht.Validator(record.NamespacedValidator{"llmnode": anything{}}),
	)
}

// anything is a record that whoever reads it has to check.
type anything struct{}

func (anything) Validate(string, []byte) error        { return nil }
func (anything) Select(string, [][]byte) (int, error) { return 0, nil }

// lookUp does what it is told with the DHT, once that knows a peer.
func lookUp(ctx context.Context, table *dht.IpfsDHT, told order) (answer, error) {
	for table.RoutingTable().Size() == 0 {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	key, err := hex.DecodeString(told.Key)
	if err != nil {
		return nil, err
	}
	switch told.Do {
	case "put":
		value, err := hex.DecodeString(told.Value)
		if err != nil {
			return nil, err
		}
		return answer{}, table.PutValue(ctx, string(key), value)
	case "get":
		value, err := table.GetValue(ctx, string(key))
		return answer{"value": hex.EncodeToString(value)}, err
	case "provide":
		return answer{}, table.Provide(ctx, cid.NewCidV1(cid.Raw, key), true)
	case "providers":
		found, err := table.FindProviders(ctx, cid.NewCidV1(cid.Raw, key))
		peers := []string{}
		for _, each := range found {
			peers = append(peers, each.ID.String())
		}
		return answer{"peers": peers}, err
	default: // "find"
		id, err := peer.Decode(told.Peer)
		if err != nil {
			return nil, err
		}
		found, err := table.FindPeer(ctx, id)
		return answer{"peers": []string{found.ID.String()}}, err
	}
}

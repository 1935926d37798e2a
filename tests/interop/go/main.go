// A go-libp2p peer for the interop tests and for `tests/bench/run transport`: TCP, Noise and yamux alone.
//
// It says on stdout where it listens, then does what it is told on stdin; a JSON object a line, both ways. It ends with
// its stdin. With the argument "relay" it is a circuit relay too, with "dht" a server of our DHT.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/libp2p/go-libp2p"
	dht "github.com/libp2p/go-libp2p-kad-dht"
	"github.com/libp2p/go-libp2p/core/host"
	"github.com/libp2p/go-libp2p/core/network"
	"github.com/libp2p/go-libp2p/core/peer"
	"github.com/libp2p/go-libp2p/core/protocol"
	"github.com/libp2p/go-libp2p/p2p/muxer/yamux"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/client"
	"github.com/libp2p/go-libp2p/p2p/protocol/circuitv2/relay"
	"github.com/libp2p/go-libp2p/p2p/protocol/ping"
	"github.com/libp2p/go-libp2p/p2p/security/noise"
	"github.com/libp2p/go-libp2p/p2p/transport/tcp"
	"github.com/multiformats/go-multiaddr"
)

const (
	echoProtocol   = protocol.ID("/llmnode-test/echo/1")   // a length of 4 bytes and as many bytes: the same back
	sinkProtocol   = protocol.ID("/llmnode-test/sink/1")   // a length of 8 bytes and as many bytes: one byte back
	sourceProtocol = protocol.ID("/llmnode-test/source/1") // a length of 8 bytes: as many bytes back
	digestProtocol = protocol.ID("/llmnode-test/digest/1") // as sink, but their SHA-256 back
	blockBytes     = 1 << 20
)

type order struct {
	Do      string `json:"do"`
	Address string `json:"address"`
	Peer    string `json:"peer"`
	Bytes   int    `json:"bytes"`
	Repeats int    `json:"repeats"`
	Streams int    `json:"streams"`
	Small   int    `json:"small"`
	Check   bool   `json:"check"`
	Key     string `json:"key"`
	Value   string `json:"value"`
}

type answer map[string]any

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	options := []libp2p.Option{
		libp2p.ListenAddrStrings("/ip4/127.0.0.1/tcp/0"),
		libp2p.NoTransports,
		libp2p.Transport(tcp.NewTCPTransport),
		libp2p.Security(noise.ID, noise.New),
		libp2p.Muxer(yamux.ID, yamux.DefaultTransport),
		libp2p.ResourceManager(&network.NullResourceManager{}),
	}
	if slices.Contains(os.Args, "relay") {
		service := libp2p.EnableRelayService(relay.WithInfiniteLimits())
		options = append(options, service, libp2p.EnableNATService(), libp2p.ForceReachabilityPublic())
	}
	node, err := libp2p.New(options...)
	if err != nil {
		return err
	}
	defer node.Close()
	serve(node)
	var table *dht.IpfsDHT
	if slices.Contains(os.Args, "dht") {
		if table, err = newDHT(context.Background(), node); err != nil {
			return err
		}
	}
	out := json.NewEncoder(os.Stdout)
	address := fmt.Sprintf("%s/p2p/%s", node.Addrs()[0], node.ID())
	if err := out.Encode(answer{"address": address, "peer": node.ID().String()}); err != nil {
		return err
	}
	orders := bufio.NewScanner(os.Stdin)
	for orders.Scan() {
		var told order
		result := answer{}
		err := json.Unmarshal(orders.Bytes(), &told)
		if err == nil {
			result, err = obey(node, table, told)
		}
		if err != nil {
			result = answer{"error": err.Error()}
		}
		if err := out.Encode(result); err != nil {
			return err
		}
	}
	return orders.Err()
}

// What it serves

func serve(node host.Host) {
	node.SetStreamHandler(echoProtocol, looped(func(stream network.Stream) error {
		var size [4]byte
		if _, err := io.ReadFull(stream, size[:]); err != nil {
			return err
		}
		message := make([]byte, 4+binary.BigEndian.Uint32(size[:]))
		copy(message, size[:])
		if _, err := io.ReadFull(stream, message[4:]); err != nil {
			return err
		}
		_, err := stream.Write(message)
		return err
	}))
	node.SetStreamHandler(sinkProtocol, looped(func(stream network.Stream) error {
		if err := take(stream, io.Discard); err != nil {
			return err
		}
		_, err := stream.Write([]byte{1})
		return err
	}))
	node.SetStreamHandler(digestProtocol, looped(func(stream network.Stream) error {
		digest := sha256.New()
		if err := take(stream, digest); err != nil {
			return err
		}
		_, err := stream.Write(digest.Sum(nil))
		return err
	}))
	node.SetStreamHandler(sourceProtocol, looped(func(stream network.Stream) error {
		var size [8]byte
		if _, err := io.ReadFull(stream, size[:]); err != nil {
			return err
		}
		return give(stream, int(binary.BigEndian.Uint64(size[:])), io.Discard)
	}))
}

func looped(once func(network.Stream) error) network.StreamHandler {
	return func(stream network.Stream) {
		for {
			if err := once(stream); errors.Is(err, io.EOF) {
				_ = stream.Close()
				return
			} else if err != nil {
				_ = stream.Reset()
				return
			}
		}
	}
}

func take(stream io.Reader, sink io.Writer) error {
	var size [8]byte
	if _, err := io.ReadFull(stream, size[:]); err != nil {
		return err
	}
	// Not io.CopyN: its buffer is a fraction of what a stream has to give.
	left, buffer := binary.BigEndian.Uint64(size[:]), make([]byte, blockBytes)
	for left > 0 {
		count, err := stream.Read(buffer[:min(left, blockBytes)])
		if err != nil {
			return err
		}
		if _, err := sink.Write(buffer[:count]); err != nil {
			return err
		}
		left -= uint64(count)
	}
	return nil
}

func give(stream io.Writer, count int, beside io.Writer) error {
	block := make([]byte, blockBytes)
	if _, err := rand.Read(block); err != nil {
		return err
	}
	for count > 0 {
		part := block[:min(count, blockBytes)]
		if _, err := stream.Write(part); err != nil {
			return err
		}
		if _, err := beside.Write(part); err != nil {
			return err
		}
		count -= len(part)
	}
	return nil
}

// What it does when it is told to

func obey(node host.Host, table *dht.IpfsDHT, told order) (answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	ctx = network.WithAllowLimitedConn(ctx, "a relay may say that a circuit does not last for ever")
	switch told.Do {
	case "connect":
		return connect(ctx, node, told.Address)
	case "reserve":
		return reserve(ctx, node, told.Address)
	case "sign":
		message, err := hex.DecodeString(told.Value)
		if err != nil {
			return nil, err
		}
		signature, err := node.Peerstore().PrivKey(node.ID()).Sign(message)
		return answer{"value": hex.EncodeToString(signature)}, err
	case "put", "get", "provide", "providers", "find":
		return lookUp(ctx, table, told)
	case "cpu":
		var usage syscall.Rusage
		err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
		return answer{"seconds": seconds(usage.Utime) + seconds(usage.Stime)}, err
	}
	id, err := peer.Decode(told.Peer)
	if err != nil {
		return nil, err
	}
	switch told.Do {
	case "disconnect":
		// It would dial whatever address it has heard of since, and not the one it is given.
		defer node.Peerstore().ClearAddrs(id)
		return answer{}, node.Network().ClosePeer(id)
	case "identify":
		protocols, err := node.Peerstore().GetProtocols(id)
		if err != nil {
			return nil, err
		}
		return answer{"protocols": protocols}, nil
	case "ping":
		pong := <-ping.Ping(ctx, node, id)
		return answer{"seconds": pong.RTT.Seconds()}, pong.Error
	case "open":
		return repeated(told.Repeats, func() error { return openAndEcho(ctx, node, id, told.Bytes) })
	case "echo":
		stream, err := node.NewStream(ctx, id, echoProtocol)
		if err != nil {
			return nil, err
		}
		defer stream.Close()
		return repeated(told.Repeats, func() error { return echo(stream, told.Bytes) })
	case "send":
		return sendAll(ctx, node, id, told)
	case "receive":
		return timed(func() error { return receive(ctx, node, id, told.Bytes) })
	case "beside":
		return beside(ctx, node, id, told)
	}
	return nil, fmt.Errorf("unknown order %q", told.Do)
}

func seconds(time syscall.Timeval) float64 { return float64(time.Sec) + float64(time.Usec)/1e6 }

func connect(ctx context.Context, node host.Host, address string) (answer, error) {
	parsed, err := multiaddr.NewMultiaddr(address)
	if err != nil {
		return nil, err
	}
	info, err := peer.AddrInfoFromP2pAddr(parsed)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	err = node.Connect(ctx, *info)
	return answer{"seconds": time.Since(began).Seconds()}, err
}

// reserve has a relay connect others with us, and says for how long.
func reserve(ctx context.Context, node host.Host, address string) (answer, error) {
	info, err := peer.AddrInfoFromString(address)
	if err != nil {
		return nil, err
	}
	granted, err := client.Reserve(ctx, node, *info)
	if err != nil {
		return nil, err
	}
	addresses := []string{}
	for _, each := range granted.Addrs {
		addresses = append(addresses, each.String())
	}
	return answer{"lifetime_s": time.Until(granted.Expiration).Seconds(), "addresses": addresses}, nil
}

// repeated says how long each took.
func repeated(times int, once func() error) (answer, error) {
	took := make([]float64, times)
	for index := range took {
		began := time.Now()
		if err := once(); err != nil {
			return nil, err
		}
		took[index] = time.Since(began).Seconds()
	}
	return answer{"seconds": took}, nil
}

func timed(once func() error) (answer, error) {
	began := time.Now()
	err := once()
	return answer{"seconds": time.Since(began).Seconds()}, err
}

func openAndEcho(ctx context.Context, node host.Host, id peer.ID, size int) error {
	stream, err := node.NewStream(ctx, id, echoProtocol)
	if err != nil {
		return err
	}
	if err := echo(stream, size); err != nil {
		return err
	}
	return stream.Close()
}

func echo(stream io.ReadWriter, size int) error {
	message := make([]byte, 4+size)
	binary.BigEndian.PutUint32(message, uint32(size))
	if _, err := stream.Write(message); err != nil {
		return err
	}
	_, err := io.ReadFull(stream, message)
	return err
}

// beside echoes small messages for as long as one stream sends.
func beside(ctx context.Context, node host.Host, id peer.ID, told order) (answer, error) {
	stream, err := node.NewStream(ctx, id, echoProtocol)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	bulk, err := openServed(ctx, node, id, told.Check)
	if err != nil {
		return nil, err
	}
	defer bulk.Close()
	began, done := time.Now(), make(chan error, 1)
	go func() { done <- send(bulk, told.Bytes, told.Check) }()
	took := []float64{}
	for {
		select {
		case err := <-done:
			return answer{"seconds": took, "bulk_seconds": time.Since(began).Seconds()}, err
		default:
		}
		sent := time.Now()
		if err := echo(stream, told.Small); err != nil {
			return nil, err
		}
		took = append(took, time.Since(sent).Seconds())
	}
}

// openServed returns a stream to send over that the other side has taken up.
func openServed(ctx context.Context, node host.Host, id peer.ID, check bool) (network.Stream, error) {
	protocol := sinkProtocol
	if check {
		protocol = digestProtocol
	}
	stream, err := node.NewStream(ctx, id, protocol)
	if err != nil {
		return nil, err
	}
	return stream, send(stream, 0, check)
}

// sendAll sends over all streams at once, and says how long that took.
func sendAll(ctx context.Context, node host.Host, id peer.ID, told order) (answer, error) {
	streams := make([]network.Stream, told.Streams)
	for index := range streams {
		stream, err := openServed(ctx, node, id, told.Check)
		if err != nil {
			return nil, err
		}
		defer stream.Close()
		streams[index] = stream
	}
	return timed(func() error {
		done := make(chan error)
		for _, stream := range streams {
			go func() { done <- send(stream, told.Bytes, told.Check) }()
		}
		var err error
		for range streams {
			err = errors.Join(err, <-done)
		}
		return err
	})
}

func send(stream io.ReadWriter, count int, check bool) error {
	var digest, theirs = io.Discard, make([]byte, 1)
	hash := sha256.New()
	if check {
		digest, theirs = hash, make([]byte, sha256.Size)
	}
	if err := binary.Write(stream, binary.BigEndian, uint64(count)); err != nil {
		return err
	}
	if err := give(stream, count, digest); err != nil {
		return err
	}
	if _, err := io.ReadFull(stream, theirs); err != nil {
		return err
	}
	if ours := hash.Sum(nil); check && !bytes.Equal(ours, theirs) {
		return fmt.Errorf("sent %s, they got %s", hex.EncodeToString(ours), hex.EncodeToString(theirs))
	}
	return nil
}

func receive(ctx context.Context, node host.Host, id peer.ID, left int) error {
	stream, err := node.NewStream(ctx, id, sourceProtocol)
	if err != nil {
		return err
	}
	defer stream.Close()
	if err := binary.Write(stream, binary.BigEndian, uint64(left)); err != nil {
		return err
	}
	buffer := make([]byte, blockBytes)
	for left > 0 {
		count, err := stream.Read(buffer[:min(left, blockBytes)])
		if err != nil {
			return err
		}
		left -= count
	}
	return nil
}

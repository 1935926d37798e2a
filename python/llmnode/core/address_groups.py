"""Groups of addresses: peer ids are free, and addresses are not, so strangers count by where they are."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def address_groups(address: str) -> tuple[str, str]:
    """The network that one owner is likely to have at hand, and the narrower one within which it is one machine.

    For public IPv4 addresses these are the /24 and the address; for IPv6 the /48 and the /56. In private networks, and
    on one's own machine, addresses are given by hand: each is a group of its own. An address of 6to4 or Teredo is in
    the group of its IPv4 address: there an owner has a /48, or chooses the /64. `address` may be another name, as of a
    relay.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address, address
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else ip)
    if ip.version == 4:
        return (_network(ip, 24), str(ip)) if ip.is_global else (str(ip), str(ip))
    return (_network(ip, 48), _network(ip, 56)) if ip.is_global else (_network(ip, 64), _network(ip, 64))


def _network(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: int) -> str:
    return str(ipaddress.ip_network((ip, bits), strict=False))

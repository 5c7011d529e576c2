//! The addresses at which workers on other nodes can reach this one.

use std::net::{IpAddr, Ipv4Addr};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::error::WorkerError;

/// The value of `--network`.
#[derive(Debug, PartialEq, Eq)]
enum Network<'a> {
    Interface(&'a str),
    /// An address, and the length of its prefix in bits.
    Subnet(Ipv4Addr, u32),
}

impl<'a> Network<'a> {
    fn parse(text: &'a str) -> Self {
        let subnet = || -> Option<Self> {
            let (address, bits) = text.split_once('/')?;
            let bits = bits.parse().ok().filter(|&bits| bits <= 32)?;
            Some(Self::Subnet(address.parse().ok()?, bits))
        };
        subnet().unwrap_or(Self::Interface(text))
    }

    fn has(&self, interface: &str, address: Ipv4Addr) -> bool {
        match *self {
            Self::Interface(name) => name == interface,
            Self::Subnet(of, bits) => (of.to_bits() ^ address.to_bits()).leading_zeros() >= bits,
        }
    }
}

/// IPv4 addresses of the interfaces of this node that are up, without loopback. With `network`, only those in it.
///
/// # Errors
/// When there is no such address.
pub(crate) fn addresses(network: Option<&str>) -> Result<Vec<IpAddr>, WorkerError> {
    let failed = |reason: String| WorkerError::Network { network: network.unwrap_or("any").to_owned(), reason };
    let wanted = network.map(Network::parse);
    let mut addresses = Vec::new();
    for interface in getifaddrs().map_err(|error| failed(error.to_string()))? {
        let Some(address) = interface.address.and_then(|address| address.as_sockaddr_in().map(|v4| v4.ip())) else {
            continue;
        };
        let usable = interface.flags.contains(InterfaceFlags::IFF_UP) && !address.is_loopback();
        if usable && wanted.as_ref().is_none_or(|wanted| wanted.has(&interface.interface_name, address)) {
            addresses.push(IpAddr::V4(address));
        }
    }
    match addresses.is_empty() {
        true => Err(failed("no interface of this node that is up has an address in it".to_owned())),
        false => Ok(addresses),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_an_interface_or_a_subnet() {
        let inside = Ipv4Addr::new(10, 77, 0, 11);
        assert!(Network::parse("10.77.0.0/24").has("eth0", inside));
        assert!(!Network::parse("10.78.0.0/24").has("eth0", inside));
        assert!(Network::parse("0.0.0.0/0").has("eth0", inside));
        assert!(Network::parse("eth0").has("eth0", inside) && !Network::parse("eth").has("eth0", inside));
        assert_eq!(Network::parse("10.77.0.0/33"), Network::Interface("10.77.0.0/33"));
    }

    #[test]
    fn a_network_that_this_node_is_not_in_is_named() {
        let error = addresses(Some("240.0.0.0/30")).unwrap_err().to_string();
        assert!(error.contains("`240.0.0.0/30`") && error.contains("no interface"), "{error}");
    }
}

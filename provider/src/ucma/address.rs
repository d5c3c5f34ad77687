//! Addresses of programs: `sockaddr_in`, `sockaddr_in6` and `sockaddr_ib`.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use ferroce_engine::rdma_cm::{Address, IbAddress};

use super::layout::{Plain, Storage, sockaddr_ib, sockaddr_in6};

/// `AF_IB`.
const AF_IB: u16 = 27;
const AF_INET: u16 = libc::AF_INET as u16;
const AF_INET6: u16 = libc::AF_INET6 as u16;
/// Size of a `sockaddr_in`.
const IN_SIZE: usize = size_of::<libc::sockaddr_in>();

/// The size of an address of that family, 0 of an unknown one.
fn size_of_family(family: u16) -> usize {
    match family {
        AF_INET => IN_SIZE,
        AF_INET6 => size_of::<sockaddr_in6>(),
        AF_IB => size_of::<sockaddr_ib>(),
        _ => 0,
    }
}

fn family(bytes: &[u8]) -> u16 {
    bytes
        .first_chunk()
        .map_or(0, |family| u16::from_ne_bytes(*family))
}

/// The address in the bytes of a `sockaddr`; `None` if its family is unknown or it does not fit.
fn parse(bytes: &[u8]) -> Option<Address> {
    let port = |at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    match family(bytes) {
        AF_INET => {
            let octets: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(Address::Ip(SocketAddr::new(
                Ipv4Addr::from(octets).into(),
                port(2)?,
            )))
        }
        AF_INET6 => {
            let mut address = sockaddr_in6::zeroed();
            address
                .bytes_mut()
                .copy_from_slice(bytes.get(..size_of::<sockaddr_in6>())?);
            Some(Address::Ip(SocketAddr::V6(SocketAddrV6::new(
                Ipv6Addr::from(address.addr),
                u16::from_be_bytes(address.port),
                u32::from_be_bytes(address.flow_info),
                address.scope_id,
            ))))
        }
        AF_IB => {
            let mut address = sockaddr_ib::zeroed();
            address
                .bytes_mut()
                .copy_from_slice(bytes.get(..size_of::<sockaddr_ib>())?);
            Some(Address::Ib(IbAddress {
                pkey: u16::from_be_bytes(address.pkey),
                flow_info: u32::from_be_bytes(address.flow_info),
                gid: address.addr,
                service_id: u64::from_be_bytes(address.sid),
                service_mask: u64::from_be_bytes(address.sid_mask),
                scope_id: address.scope_id,
            }))
        }
        _ => None,
    }
}

/// The bytes of a `sockaddr_storage`.
fn storage_bytes(storage: &Storage) -> [u8; 128] {
    let mut bytes = [0; 128];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(storage) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// The address in a `sockaddr_storage` whose size the program states: EINVAL if that is not the family's.
pub fn from_storage(storage: &Storage, size: u16) -> Result<Address, c_int> {
    let bytes = storage_bytes(storage);
    if size == 0 || usize::from(size) != size_of_family(family(&bytes)) {
        return Err(libc::EINVAL);
    }
    parse(&bytes).ok_or(libc::EINVAL)
}

/// The address in a field of the commands for IP: EINVAL for any other.
pub fn from_in6(address: &sockaddr_in6) -> Result<Address, c_int> {
    match address.family {
        AF_INET | AF_INET6 => parse(address.bytes()).ok_or(libc::EINVAL),
        _ => Err(libc::EINVAL),
    }
}

/// The bytes of the `sockaddr`.
fn emit(address: &Address) -> Vec<u8> {
    match address {
        Address::Ip(SocketAddr::V4(v4)) => {
            let mut bytes = vec![0; IN_SIZE];
            bytes[..2].copy_from_slice(&AF_INET.to_ne_bytes());
            bytes[2..4].copy_from_slice(&v4.port().to_be_bytes());
            bytes[4..8].copy_from_slice(&v4.ip().octets());
            bytes
        }
        Address::Ip(SocketAddr::V6(v6)) => sockaddr_in6 {
            family: AF_INET6,
            port: v6.port().to_be_bytes(),
            flow_info: v6.flowinfo().to_be_bytes(),
            addr: v6.ip().octets(),
            scope_id: v6.scope_id(),
        }
        .bytes()
        .to_vec(),
        Address::Ib(ib) => to_ib(ib).bytes().to_vec(),
    }
}

fn to_ib(address: &IbAddress) -> sockaddr_ib {
    sockaddr_ib {
        family: AF_IB,
        pkey: address.pkey.to_be_bytes(),
        flow_info: address.flow_info.to_be_bytes(),
        addr: address.gid,
        sid: address.service_id.to_be_bytes(),
        sid_mask: address.service_mask.to_be_bytes(),
        scope_id: address.scope_id,
    }
}

/// The address as a `sockaddr_storage`, and its size; no address has size 0.
pub fn to_storage(address: Option<&Address>) -> (Storage, u16) {
    let bytes = address.map(emit).unwrap_or_default();
    let mut storage = Storage::default();
    for (word, chunk) in storage.iter_mut().zip(bytes.chunks(8)) {
        let mut full = [0; 8];
        full[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(full);
    }
    (storage, bytes.len() as u16)
}

/// The address as a field of the responses for IP; what does not fit is cut off, as by the kernel.
pub fn to_in6(address: Option<&Address>) -> sockaddr_in6 {
    let mut field = sockaddr_in6::zeroed();
    if let Some(address) = address {
        let bytes = emit(address);
        let fits = bytes.len().min(size_of::<sockaddr_in6>());
        field.bytes_mut()[..fits].copy_from_slice(&bytes[..fits]);
    }
    field
}

/// The address as `AF_IB` has it: of an IP address its GID, and a service id of the port space (a number) and port.
pub fn as_ib(address: Option<&Address>, gid: [u8; 16], pkey: u16, port_space: u16) -> IbAddress {
    let port = match address {
        Some(Address::Ib(ib)) => return *ib,
        Some(Address::Ip(ip)) => ip.port(),
        None => 0,
    };
    IbAddress {
        pkey,
        gid,
        service_id: u64::from(port_space) << 16 | u64::from(port),
        ..IbAddress::default()
    }
}

/// The GID of an IP address, zeros without one.
pub fn gid_of(address: Option<&Address>) -> [u8; 16] {
    match address {
        Some(Address::Ip(ip)) => match ip.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        },
        Some(Address::Ib(ib)) => ib.gid,
        None => [0; 16],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_their_bytes() {
        let ip = |text: &str| Address::Ip(text.parse().unwrap());
        let scoped = SocketAddrV6::new("fe80::1".parse().unwrap(), 7471, 0x12345, 9);
        let ib = Address::Ib(IbAddress {
            pkey: 0xffff,
            flow_info: 7,
            gid: [3; 16],
            service_id: 0x0106_0000,
            service_mask: 0xffff_ffff_ffff_0000,
            scope_id: 0,
        });
        for (address, size) in [
            (ip("10.0.0.1:7471"), 16),
            (ip("[fd00::5]:1"), 28),
            (Address::Ip(scoped.into()), 28),
            (ib, 48),
        ] {
            let (storage, length) = to_storage(Some(&address));
            assert_eq!(length, size);
            assert_eq!(from_storage(&storage, size), Ok(address));
            assert_eq!(from_storage(&storage, size + 1), Err(libc::EINVAL));
            assert_eq!(from_storage(&storage, 0), Err(libc::EINVAL));
            let field = to_in6(Some(&address));
            assert_eq!(from_in6(&field).ok(), (size < 48).then_some(address));
        }
        assert_eq!(to_storage(None), (Storage::default(), 0));
        assert_eq!(from_storage(&Storage::default(), 16), Err(libc::EINVAL));
    }

    #[test]
    fn an_ipv4_address_is_laid_out_as_in_c() {
        let field = to_in6(Some(&Address::Ip("10.0.0.1:7471".parse().unwrap())));
        assert_eq!(field.bytes()[..8], [2, 0, 0x1d, 0x2f, 10, 0, 0, 1]);
        assert_eq!(field.bytes()[8..], [0; 20]);
    }

    #[test]
    fn the_service_id_has_port_space_and_port() {
        let address = Address::Ip("10.0.0.1:7471".parse().unwrap());
        let ib = as_ib(Some(&address), [1; 16], 0xffff, 0x0106);
        assert_eq!(ib.service_id, 0x0106_1d2f);
        assert_eq!(as_ib(None, [0; 16], 0, 0x0111).service_id, 0x0111_0000);
    }
}

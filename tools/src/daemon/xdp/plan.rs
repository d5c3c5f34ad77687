//! Whether and how an interface is put into XDP mode: what is refused, defaults, and what errors of the kernel mean.

use std::fs;
use std::io;
use std::os::fd::AsFd;

use ferroce_engine::control::protocol::XdpOptions;
use ferroce_engine::control::{Refusal, XdpInfo};
use ferroce_engine::link::xdp::Geometry;
use ferroce_engine::link::xdp::port::{NOT_SHARED, PortError, Zerocopy};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::daemon::sys;
use crate::netlink::{Interface, Interfaces};

/// Programs that can use a device, unless the user says otherwise.
const PROGRAMS: u16 = 16;
/// Most queues of an interface that a port serves.
const MAX_QUEUES: u16 = 64;
/// Entries of a transmit ring, and so packets of a program that are under way at most.
const TX_RING: u32 = 256;
/// The same where the driver has a queue of 256 packets for all senders together, and drops what finds no room there (a
/// little less, as it takes packets out in batches).
const VETH_TX_RING: u32 = 128;
/// Entries of a receive ring, where there are few of them: what comes in some milliseconds, for which a program may well
/// be off its CPU, and a message of 1 MiB at path MTU 1024 even then. On UC and UD nobody repeats what finds no room.
const RX_RING: u32 = 2048;
/// Entries of a receive ring, however many there are.
const LEAST_RX_RING: u32 = 64;
/// Entries of all receive rings together, beyond which rings are made smaller: each stands for a frame of memory.
const MAX_ENTRIES: u32 = 65_536;
/// Bytes of an Ethernet header and a priority tag.
const FRAME_OVERHEAD: u32 = 14 + 4;
/// The least MTU for a path MTU of 256 bytes: IPv6, UDP and the longest RoCE headers.
const LEAST_MTU: u32 = 256 + 40 + 8 + 12 + 28 + 4;

/// Refuses interfaces that XDP mode is not for.
pub fn check(interface: &Interface, all: &Interfaces) -> Result<(), Refusal> {
    let netdev = interface.name.clone();
    let unsuitable = |what: String, instead: &str| {
        Err(Refusal::XdpUnsuitable {
            netdev: netdev.clone(),
            what,
            instead: instead.to_owned(),
        })
    };
    let kind = interface.kind.as_deref().unwrap_or_default();
    if interface.lo {
        return unsuitable(
            "the loopback".to_owned(),
            "use its device in UDP mode, as packets that stay on the host take UDP sockets anyway",
        );
    }
    if !interface.ethernet {
        return unsuitable("no Ethernet interface".to_owned(), "use its device in UDP mode");
    }
    match kind {
        "bond" | "team" => return unsuitable(format!("a {kind}"), "use its device in UDP mode"),
        "bridge" => return unsuitable("a bridge".to_owned(), "use its device in UDP mode"),
        _ => {}
    }
    if let Some(master) = interface.master {
        let (name, kind) = match all.get(&master) {
            Some(master) => (
                master.name.clone(),
                master.kind.clone().unwrap_or_else(|| "interface".to_owned()),
            ),
            None => (format!("interface {master}"), "interface".to_owned()),
        };
        return unsuitable(
            format!("a port of the {kind} {name}"),
            &format!("`ip link set {netdev} nomaster` takes it out; or use the device of {name} in UDP mode"),
        );
    }
    if !interface.up {
        return Err(Refusal::InterfaceDown { netdev });
    }
    if interface.mtu < LEAST_MTU {
        return Err(Refusal::MtuTooSmall {
            netdev,
            mtu: interface.mtu,
            least: LEAST_MTU,
        });
    }
    if let Some(program) = interface.xdp_program {
        return Err(Refusal::XdpInUse {
            netdev,
            program: Some(program).filter(|id| *id != 0),
        });
    }
    Ok(())
}

/// Makes sure that the kernel has AF_XDP sockets, and gives us some.
pub fn check_kernel(netdev: &str) -> Result<(), Refusal> {
    const AF_XDP: u16 = 44;
    let family = AddressFamily::from_raw(AF_XDP);
    match socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, None) {
        Ok(_) => Ok(()),
        Err(error) => Err(refuse("open an AF_XDP socket", &error.into(), netdev)),
    }
}

/// How the memory of a port is to be divided, by what the user asked for and what the interface has.
pub fn geometry(options: &XdpOptions, interface: &Interface, queues: u16) -> Result<Geometry, Refusal> {
    let bad = |word: &str, value: u32, allowed: &str| Refusal::BadXdpOption {
        word: word.to_owned(),
        value,
        allowed: allowed.to_owned(),
    };
    let most = queues.clamp(1, MAX_QUEUES);
    let queues = match options.queues {
        None => most,
        Some(0) => return Err(bad("queues", 0, "1 or more")),
        Some(wanted) if wanted > most => {
            return Err(Refusal::TooManyQueues {
                netdev: interface.name.clone(),
                queues: most,
            });
        }
        Some(wanted) => wanted,
    };
    let seats = options.programs.unwrap_or(PROGRAMS);
    if !(1..=251).contains(&seats) {
        return Err(bad("programs", seats.into(), "1 to 251"));
    }
    let chunk = match options.chunk {
        None if fits_one_piece(2048, interface.mtu) => 2048,
        None => 4096,
        Some(chunk @ (2048 | 4096)) => chunk,
        Some(other) => return Err(bad("chunk", other, "2048 or 4096")),
    };
    let mut rx_ring = RX_RING;
    while rx_ring > LEAST_RX_RING && rx_ring * u32::from(queues) * u32::from(seats) > MAX_ENTRIES {
        rx_ring /= 2;
    }
    let tx_ring = match interface.kind.as_deref() {
        Some("veth") => VETH_TX_RING,
        _ => TX_RING,
    };
    Ok(Geometry {
        chunk,
        queues,
        seats,
        rx_ring,
        tx_ring,
    })
}

/// Whether a packet of `mtu` bytes is received in one frame of `chunk` bytes.
fn fits_one_piece(chunk: u32, mtu: u32) -> bool {
    let geometry = Geometry {
        chunk,
        ..Geometry::default()
    };
    (mtu + FRAME_OVERHEAD) as usize <= geometry.piece()
}

/// The longest packet, in bytes: without multi-buffer what one frame takes.
pub fn longest_packet(info: &XdpInfo) -> u32 {
    if info.features.multi_buffer {
        return u32::MAX;
    }
    (info.geometry.piece() as u32).saturating_sub(FRAME_OVERHEAD)
}

/// Queues that an interface has in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queues {
    /// Those by which packets arrive.
    pub receive: u16,
    /// Those by which they leave.
    pub send: u16,
}

impl Queues {
    /// Queues that a port can serve: its sockets both send and receive.
    pub fn usable(self) -> u16 {
        self.receive.min(self.send)
    }
}

/// Queues that the interface has in use: as the driver says, or as sysfs shows them.
pub fn queues(netdev: &str, ifindex: u32) -> Queues {
    let by_driver = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .ok()
        .and_then(|socket| sys::channels(socket.as_fd(), netdev));
    let (receive, send) = by_driver
        .or_else(|| queues_in_sysfs(netdev, ifindex))
        .unwrap_or((1, 1));
    let bounded = |queues: u32| u16::try_from(queues).unwrap_or(u16::MAX).max(1);
    Queues {
        receive: bounded(receive),
        send: bounded(send),
    }
}

/// Those of receiving and of sending, if sysfs is of this network namespace.
fn queues_in_sysfs(netdev: &str, ifindex: u32) -> Option<(u32, u32)> {
    let directory = format!("/sys/class/net/{netdev}");
    let index = fs::read_to_string(format!("{directory}/ifindex")).ok()?;
    if index.trim().parse() != Ok(ifindex) {
        return None;
    }
    let names: Vec<String> = fs::read_dir(format!("{directory}/queues"))
        .ok()?
        .flatten()
        .map(|queue| queue.file_name().to_string_lossy().into_owned())
        .collect();
    let count = |start: &str| names.iter().filter(|name| name.starts_with(start)).count() as u32;
    Some((count("rx-"), count("tx-")))
}

/// What the user should know of a port: each one line.
pub fn notes(info: &XdpInfo, interface: &Interface, queues: Queues) -> Vec<String> {
    let netdev = &interface.name;
    let mut notes = Vec::new();
    let served = info.geometry.queues;
    if served < queues.receive {
        notes.push(format!(
            "{netdev} has {} receive queues, of which {served} are served: RoCE that arrives on the others takes the slower way by UDP sockets; `ethtool -X {netdev} equal {served}` steers all to those that are served",
            queues.receive
        ));
    }
    let longest = longest_packet(info);
    if longest < interface.mtu {
        notes.push(format!(
            "packets take one frame each with this kernel (before Linux 6.6) or driver: the MTU of the device is {longest}, not {}",
            interface.mtu
        ));
    }
    notes
}

/// Whether another kind of attachment may be tried after this error. Drivers have many ways to say no: ENOMEM and ENOSPC,
/// too, where they lack queues.
pub fn is_of_the_driver(error: &io::Error) -> bool {
    !matches!(
        error.raw_os_error(),
        Some(
            libc::EPERM
                | libc::EBUSY
                | libc::EEXIST
                | libc::ENOSYS
                | libc::ENODEV
                | libc::EMFILE
                | libc::ENFILE
        )
    )
}

/// Why a port was not made.
pub fn refuse_port(error: &PortError, netdev: &str, geometry: &Geometry, zerocopy: Zerocopy) -> Refusal {
    let PortError { what, source } = error;
    match source.raw_os_error() {
        _ if *what == NOT_SHARED => Refusal::XdpUnsupported {
            what: NOT_SHARED.to_owned(),
        },
        Some(libc::EBUSY) => Refusal::XdpQueueInUse {
            netdev: netdev.to_owned(),
        },
        Some(libc::ENOMEM | libc::ENOBUFS | libc::ENOSPC) => Refusal::XdpNoMemory {
            netdev: netdev.to_owned(),
            mebibytes: (geometry.umem_len() >> 20) as u32,
            reason: error.to_string(),
        },
        Some(libc::EOPNOTSUPP | libc::EINVAL) if zerocopy == Zerocopy::On => Refusal::ZerocopyRefused {
            netdev: netdev.to_owned(),
            reason: source.to_string(),
        },
        _ => refuse(what, source, netdev),
    }
}

/// Why the XDP program is not on the interface, which had none when `plan` looked.
pub fn refuse_attachment(error: &io::Error, netdev: &str) -> Refusal {
    match error.raw_os_error() {
        Some(libc::EBUSY) => Refusal::XdpInUse {
            netdev: netdev.to_owned(),
            program: None,
        },
        Some(libc::EEXIST) => Refusal::XdpAbove {
            netdev: netdev.to_owned(),
        },
        Some(libc::EOPNOTSUPP | libc::EINVAL | libc::EACCES | libc::ERANGE | libc::E2BIG | libc::ENOSPC) => {
            Refusal::XdpRefused {
                netdev: netdev.to_owned(),
                reason: error.to_string(),
            }
        }
        Some(libc::ENOSYS) => Refusal::XdpUnsupported {
            what: "eBPF as XDP mode takes it (Linux 6.4 and later have it)".to_owned(),
        },
        _ => refuse("attach the XDP program", error, netdev),
    }
}

/// What errors mean at any step.
fn refuse(what: &str, error: &io::Error, netdev: &str) -> Refusal {
    let netdev = netdev.to_owned();
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Refusal::XdpNotPermitted { netdev },
        Some(libc::EAFNOSUPPORT) => Refusal::XdpUnsupported {
            what: "AF_XDP sockets".to_owned(),
        },
        Some(libc::ENETDOWN) => Refusal::InterfaceDown { netdev },
        Some(libc::ENODEV | libc::ENXIO) => Refusal::UnknownInterface { netdev },
        Some(libc::EMFILE | libc::ENFILE) => Refusal::Failed(format!(
            "{what}: {error}: give fewer `programs` or `queues`, or raise its limit of open files (`ulimit -n`)"
        )),
        _ => Refusal::Failed(format!("XDP mode on {netdev}: {what}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic() -> Interface {
        Interface {
            name: "eth0".into(),
            mtu: 1500,
            up: true,
            ethernet: true,
            ..Interface::default()
        }
    }

    #[test]
    fn defaults_follow_the_interface() {
        let none = XdpOptions::default();
        let plan = |options: &XdpOptions, mtu, queues| {
            geometry(options, &Interface { mtu, ..nic() }, queues).unwrap()
        };
        let usual = plan(&none, 1500, 1);
        assert_eq!(
            (
                usual.chunk,
                usual.queues,
                usual.seats,
                usual.rx_ring,
                usual.tx_ring
            ),
            (2048, 1, 16, 2048, 256)
        );
        let veth = Interface {
            kind: Some("veth".into()),
            ..nic()
        };
        assert_eq!(geometry(&none, &veth, 1).unwrap().tx_ring, 128);
        assert_eq!(plan(&none, 1774, 1).chunk, 2048);
        assert_eq!(plan(&none, 1775, 1).chunk, 4096);
        assert_eq!(plan(&none, 9000, 1).chunk, 4096);
        // Many queues: all of them, with rings that stay in bounds.
        for queues in [1, 2, 8, 63, 64, 128] {
            for programs in [1, 16, 32, 251] {
                let options = XdpOptions {
                    programs: Some(programs),
                    ..none
                };
                let made = plan(&options, 1500, queues);
                assert!(made.is_sound(), "{made:?}");
                assert_eq!(made.queues, queues.min(64));
                let entries = made.rx_ring * u32::from(made.queues) * u32::from(made.seats);
                assert!(made.rx_ring == 64 || entries <= MAX_ENTRIES);
            }
        }
        assert_eq!(plan(&none, 1500, 8).rx_ring, 512);
        let fewer = XdpOptions {
            queues: Some(2),
            chunk: Some(4096),
            ..none
        };
        assert_eq!(
            (plan(&fewer, 1500, 8).queues, plan(&fewer, 1500, 8).chunk),
            (2, 4096)
        );
    }

    #[test]
    fn what_can_not_be_is_refused() {
        let with = |options: XdpOptions| geometry(&options, &nic(), 4).unwrap_err();
        let none = XdpOptions::default();
        assert_eq!(
            with(XdpOptions {
                queues: Some(5),
                ..none
            }),
            Refusal::TooManyQueues {
                netdev: "eth0".into(),
                queues: 4
            }
        );
        for options in [
            XdpOptions {
                queues: Some(0),
                ..none
            },
            XdpOptions {
                programs: Some(252),
                ..none
            },
            XdpOptions {
                programs: Some(0),
                ..none
            },
            XdpOptions {
                chunk: Some(3000),
                ..none
            },
        ] {
            assert!(
                matches!(with(options), Refusal::BadXdpOption { .. }),
                "{options:?}"
            );
        }
    }

    #[test]
    fn what_costs_speed_is_said() {
        let geometry = geometry(&XdpOptions::default(), &nic(), 2).unwrap();
        let mut info = XdpInfo {
            geometry,
            ..XdpInfo::default()
        };
        let queues = |receive| Queues { receive, send: 2 };
        assert!(notes(&info, &nic(), queues(2)).is_empty());
        let said = notes(&info, &nic(), queues(8));
        assert!(
            matches!(&said[..], [one] if one.contains("ethtool -X eth0 equal 2")),
            "{said:?}"
        );
        let jumbo = Interface { mtu: 9000, ..nic() };
        let said = notes(&info, &jumbo, queues(2));
        assert!(
            matches!(&said[..], [one] if one.contains("1774, not 9000")),
            "{said:?}"
        );
        info.features.multi_buffer = true;
        assert!(notes(&info, &jumbo, queues(2)).is_empty());
    }

    #[test]
    fn interfaces_that_it_is_not_for_are_refused() {
        let bridge = Interface {
            name: "br0".into(),
            kind: Some("bridge".into()),
            ..nic()
        };
        let all = Interfaces::from([(7, bridge.clone())]);
        assert_eq!(check(&nic(), &all), Ok(()));
        let said = |interface: Interface| check(&interface, &all).unwrap_err().to_string();
        assert!(said(bridge).starts_with("br0 is a bridge,"));
        let port = Interface {
            master: Some(7),
            ..nic()
        };
        assert!(said(port).starts_with("eth0 is a port of the bridge br0,"));
        let bond = Interface {
            kind: Some("bond".into()),
            ..nic()
        };
        assert!(said(bond).contains("a bond"));
        let tunnel = Interface {
            ethernet: false,
            ..nic()
        };
        assert!(said(tunnel).contains("no Ethernet"));
        let down = Interface { up: false, ..nic() };
        assert!(said(down).contains("ip link set eth0 up"));
        let small = Interface { mtu: 300, ..nic() };
        assert!(said(small).contains("mtu 348"));
        let taken = Interface {
            xdp_program: Some(42),
            ..nic()
        };
        assert!(said(taken).contains("(id 42)"));
    }

    #[test]
    fn errors_of_the_kernel_are_told_apart() {
        let geometry = geometry(&XdpOptions::default(), &nic(), 1).unwrap();
        let attachment = |errno| refuse_attachment(&io::Error::from_raw_os_error(errno), "eth0");
        let port = |errno, zerocopy| {
            let source = io::Error::from_raw_os_error(errno);
            let what = "bind";
            refuse_port(&PortError { what, source }, "eth0", &geometry, zerocopy)
        };
        assert!(matches!(attachment(libc::EPERM), Refusal::XdpNotPermitted { .. }));
        assert!(matches!(attachment(libc::EBUSY), Refusal::XdpInUse { .. }));
        assert!(matches!(attachment(libc::EEXIST), Refusal::XdpAbove { .. }));
        assert!(matches!(attachment(libc::EOPNOTSUPP), Refusal::XdpRefused { .. }));
        assert!(matches!(attachment(libc::ENOSYS), Refusal::XdpUnsupported { .. }));
        assert!(matches!(
            port(libc::EBUSY, Zerocopy::Auto),
            Refusal::XdpQueueInUse { .. }
        ));
        assert!(matches!(
            port(libc::ENOBUFS, Zerocopy::Auto),
            Refusal::XdpNoMemory { mebibytes: 1.., .. }
        ));
        assert!(matches!(
            port(libc::EOPNOTSUPP, Zerocopy::On),
            Refusal::ZerocopyRefused { .. }
        ));
        assert!(matches!(
            port(libc::EOPNOTSUPP, Zerocopy::Auto),
            Refusal::Failed(_)
        ));
        assert!(matches!(
            port(libc::EAFNOSUPPORT, Zerocopy::Auto),
            Refusal::XdpUnsupported { .. }
        ));
        assert!(matches!(
            port(libc::ENETDOWN, Zerocopy::Auto),
            Refusal::InterfaceDown { .. }
        ));
    }
}

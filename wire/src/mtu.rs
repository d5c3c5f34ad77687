//! Path MTU: the largest payload of one packet (reference section 1; IBTA 9.7.4.1.6).

use crate::packet::ICRC_LEN;
use crate::{Bth, ImmDt, Reth, XrcEth};

/// Headers between the start of the IP header and the end of the ICRC, at their largest around
/// a full payload: IPv6, UDP, BTH, XRCETH, RETH, immediate data, ICRC.
pub const MAX_OVERHEAD: usize = 40 + 8 + Bth::LEN + XrcEth::LEN + Reth::LEN + ImmDt::LEN + ICRC_LEN;

/// A path MTU that the standard knows; the number is the verbs code.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum PathMtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl PathMtu {
    /// All, ascending.
    pub const ALL: [PathMtu; 5] = [
        Self::Mtu256,
        Self::Mtu512,
        Self::Mtu1024,
        Self::Mtu2048,
        Self::Mtu4096,
    ];

    /// The value of `enum ibv_mtu` and of the CM's path MTU field, 1 to 5.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The path MTU of such a code.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Mtu256),
            2 => Some(Self::Mtu512),
            3 => Some(Self::Mtu1024),
            4 => Some(Self::Mtu2048),
            5 => Some(Self::Mtu4096),
            _ => None,
        }
    }

    /// Payload bytes.
    pub const fn bytes(self) -> usize {
        128 << self as usize
    }

    /// The path MTU of so many payload bytes.
    pub const fn from_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            256 => Some(Self::Mtu256),
            512 => Some(Self::Mtu512),
            1024 => Some(Self::Mtu1024),
            2048 => Some(Self::Mtu2048),
            4096 => Some(Self::Mtu4096),
            _ => None,
        }
    }

    /// The largest path MTU whose packets fit an interface MTU of `mtu` bytes (the IP packet).
    ///
    /// The overhead counted is [`MAX_OVERHEAD`], 88 bytes: what a full packet can really have.
    /// The kernel's core counts 96 (an AtomicETH, which comes without payload), rxe 80 (no XRC);
    /// all three agree on the usual MTUs: 1500 gives 1024, 4200 and more give 4096. `None` when
    /// not even 256 fits.
    pub fn from_netdev_mtu(mtu: usize) -> Option<Self> {
        Self::ALL
            .into_iter()
            .rev()
            .find(|p| p.bytes() + MAX_OVERHEAD <= mtu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_interface_mtu() {
        assert_eq!(MAX_OVERHEAD, 88);
        for (mtu, expect) in [
            (0, None),
            (343, None),
            (344, Some(PathMtu::Mtu256)),
            (1280, Some(PathMtu::Mtu1024)),
            (1500, Some(PathMtu::Mtu1024)),
            (4183, Some(PathMtu::Mtu2048)),
            (4184, Some(PathMtu::Mtu4096)),
            (4200, Some(PathMtu::Mtu4096)),
            (9000, Some(PathMtu::Mtu4096)),
            (65536, Some(PathMtu::Mtu4096)),
        ] {
            assert_eq!(PathMtu::from_netdev_mtu(mtu), expect, "{mtu}");
        }
    }

    #[test]
    fn codes_and_bytes() {
        for (i, mtu) in PathMtu::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(mtu.code()), i + 1);
            assert_eq!(mtu.bytes(), 256 << i);
            assert_eq!(PathMtu::from_code(mtu.code()), Some(mtu));
            assert_eq!(PathMtu::from_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!(PathMtu::from_code(0), None);
        assert_eq!(PathMtu::from_code(6), None);
        assert_eq!(PathMtu::from_bytes(1000), None);
    }
}

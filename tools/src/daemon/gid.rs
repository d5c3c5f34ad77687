//! The GID table of one device: which address stands at which index.

use std::net::IpAddr;

use ferroce_engine::control::{GID_TABLE_LEN, GidEntry};
use tracing::warn;

use crate::netlink::Address;

/// A GID table that follows the addresses of an interface.
///
/// A new table holds the IPv6 link-local address first (if there is one), then IPv4-mapped, then
/// other IPv6. Later an address that goes leaves a hole, and one that comes fills the first hole.
#[derive(Clone, Debug, Default)]
pub struct GidTable {
    entries: Vec<Option<GidEntry>>,
    /// Index 0 waits for this link-local address, whose duplicate address detection was under way
    /// when the table was new: programs count on a fixed order however early they start.
    awaited: Option<IpAddr>,
}

impl GidTable {
    /// The table of an interface with these addresses.
    pub fn new(addresses: &[Address]) -> Self {
        let mut table = Self::default();
        let link_local = addresses.iter().find(|address| is_link_local(address.ip));
        match link_local {
            Some(first) if first.usable => table.insert(first.ip),
            Some(first) => {
                table.awaited = Some(first.ip);
                table.entries.push(None);
            }
            None => {}
        }
        table.follow(addresses);
        table
    }

    /// The table that an earlier daemon had, with these addresses now. A program tells it: only the order counts.
    pub fn restored(entries: &[Option<GidEntry>], addresses: &[Address]) -> Self {
        let own = |entry: &Option<GidEntry>| entry.map(|entry| GidEntry::roce_v2(entry.addr));
        let entries = entries.iter().take(GID_TABLE_LEN).map(own).collect();
        let mut table = Self {
            entries,
            awaited: None,
        };
        table.follow(addresses);
        table
    }

    /// Takes over the present addresses; true if the table changed.
    pub fn follow(&mut self, addresses: &[Address]) -> bool {
        let before = self.entries.clone();
        for entry in &mut self.entries {
            let stays = |entry: &GidEntry| {
                addresses
                    .iter()
                    .any(|address| address.usable && address.ip == entry.addr)
            };
            *entry = entry.filter(stays);
        }
        if self
            .awaited
            .is_some_and(|ip| addresses.iter().all(|address| address.ip != ip))
        {
            self.awaited = None;
        }
        let missing = |address: &&Address| {
            address.usable
                && !self
                    .entries
                    .iter()
                    .flatten()
                    .any(|entry| entry.addr == address.ip)
        };
        let (v4, v6): (Vec<_>, Vec<_>) = addresses
            .iter()
            .filter(missing)
            .map(|address| address.ip)
            .partition(IpAddr::is_ipv4);
        for ip in v4.into_iter().chain(v6) {
            self.insert(ip);
        }
        while let Some(None) = self.entries.last()
            && !(self.awaited.is_some() && self.entries.len() == 1)
        {
            self.entries.pop();
        }
        self.entries != before
    }

    /// The entries by index; holes at the end are left out.
    pub fn entries(&self) -> Vec<Option<GidEntry>> {
        let used = self
            .entries
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |last| last + 1);
        self.entries.iter().take(used).copied().collect()
    }

    fn insert(&mut self, ip: IpAddr) {
        let entry = Some(GidEntry::roce_v2(ip));
        if self.awaited == Some(ip) {
            self.awaited = None;
        }
        let reserved = usize::from(self.awaited.is_some());
        let used = self.entries.len();
        match self
            .entries
            .iter_mut()
            .skip(reserved)
            .find(|entry| entry.is_none())
        {
            Some(hole) => *hole = entry,
            None if used < GID_TABLE_LEN => self.entries.push(entry),
            None => warn!(%ip, "GID table is full, the address is left out"),
        }
    }
}

/// True for `fe80::/10`.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(text: &[&str]) -> Vec<Address> {
        let one = |text: &&str| match text.strip_suffix(" tentative") {
            Some(ip) => Address {
                ip: ip.parse().unwrap(),
                usable: false,
            },
            None => Address {
                ip: text.parse().unwrap(),
                usable: true,
            },
        };
        text.iter().map(one).collect()
    }

    fn shown(table: &GidTable) -> Vec<String> {
        table
            .entries()
            .iter()
            .map(|entry| entry.map_or("-".into(), |entry| entry.addr.to_string()))
            .collect()
    }

    #[test]
    fn new_table_has_link_local_then_v4_then_v6() {
        let table = GidTable::new(&addresses(&[
            "2001:db8::1",
            "10.0.0.1",
            "fe80::2",
            "10.0.0.2",
            "fe80::3",
        ]));
        assert_eq!(
            shown(&table),
            ["fe80::2", "10.0.0.1", "10.0.0.2", "2001:db8::1", "fe80::3"]
        );
        assert_eq!(
            shown(&GidTable::new(&addresses(&["::1", "127.0.0.1"]))),
            ["127.0.0.1", "::1"]
        );
    }

    #[test]
    fn holes_are_kept_and_filled_by_the_next() {
        let mut table = GidTable::new(&addresses(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]));
        assert!(table.follow(&addresses(&["10.0.0.1", "10.0.0.3"])));
        assert_eq!(shown(&table), ["10.0.0.1", "-", "10.0.0.3"]);
        assert!(!table.follow(&addresses(&["10.0.0.3", "10.0.0.1"])));
        assert!(table.follow(&addresses(&["10.0.0.1", "10.0.0.3", "2001:db8::1", "10.0.0.4"])));
        assert_eq!(shown(&table), ["10.0.0.1", "10.0.0.4", "10.0.0.3", "2001:db8::1"]);
        assert!(table.follow(&addresses(&["10.0.0.4"])));
        assert_eq!(shown(&table), ["-", "10.0.0.4"]);
        assert!(table.follow(&[]));
        assert!(table.entries().is_empty());
    }

    #[test]
    fn link_local_under_detection_keeps_index_zero() {
        let mut table = GidTable::new(&addresses(&[
            "fe80::1 tentative",
            "2001:db8::1 tentative",
            "10.0.0.1",
        ]));
        assert_eq!(shown(&table), ["-", "10.0.0.1"]);
        table.follow(&addresses(&["fe80::1 tentative", "2001:db8::1", "10.0.0.1"]));
        assert_eq!(shown(&table), ["-", "10.0.0.1", "2001:db8::1"]);
        table.follow(&addresses(&["fe80::1", "2001:db8::1", "10.0.0.1"]));
        assert_eq!(shown(&table), ["fe80::1", "10.0.0.1", "2001:db8::1"]);
    }

    #[test]
    fn failed_link_local_gives_its_index_up() {
        let mut table = GidTable::new(&addresses(&["fe80::1 tentative"]));
        assert!(shown(&table).is_empty());
        table.follow(&addresses(&["10.0.0.1"]));
        assert_eq!(shown(&table), ["10.0.0.1"]);
    }

    #[test]
    fn restored_table_keeps_the_order() {
        let mut earlier = GidTable::new(&addresses(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]));
        earlier.follow(&addresses(&["10.0.0.2", "10.0.0.3"]));
        let table = GidTable::restored(&earlier.entries(), &addresses(&["fe80::1", "10.0.0.3"]));
        assert_eq!(shown(&table), ["fe80::1", "-", "10.0.0.3"]);
        // A GID that is not that of its address is not taken over.
        let mut forged = earlier.entries();
        forged.iter_mut().flatten().for_each(|entry| entry.gid = [7; 16]);
        let restored = GidTable::restored(&forged, &addresses(&["fe80::1", "10.0.0.3"]));
        assert_eq!(restored.entries(), table.entries());
    }

    #[test]
    fn table_is_bounded() {
        let many: Vec<_> = (0..300u32)
            .map(|n| Address {
                ip: std::net::Ipv4Addr::from(0x0a00_0001 + n).into(),
                usable: true,
            })
            .collect();
        assert_eq!(GidTable::new(&many).entries().len(), GID_TABLE_LEN);
    }
}

//! The GID table of one device: which address stands at which index.

use std::net::IpAddr;

use ferroce_engine::control::{GID_TABLE_LEN, GidEntry, LinkMode};
use ferroce_engine::link::RoceVersion;
use tracing::warn;

use crate::netlink::Address;

/// A GID table that follows the addresses of an interface.
///
/// A new table holds the IPv6 link-local address first (if there is one), then IPv4-mapped, then
/// other IPv6; on a device that speaks RoCE v1 as well, all of these once more behind them, as v1.
/// Later an address that goes leaves holes, and one that comes fills the first ones.
#[derive(Clone, Debug, Default)]
pub struct GidTable {
    entries: Vec<Option<GidEntry>>,
    /// Indices that wait for addresses whose duplicate address detection was under way when the
    /// table was new: programs count on a fixed order however early they start.
    reserved: Vec<(usize, GidEntry)>,
    with_v1: bool,
}

impl GidTable {
    /// The table of an interface with these addresses, for a device of that mode.
    pub fn new(addresses: &[Address], mode: LinkMode) -> Self {
        let mut table = Self {
            with_v1: mode.has_roce_v1(),
            ..Self::default()
        };
        let first = addresses.iter().find(|address| is_link_local(address.ip));
        let others = |v4: bool| {
            addresses
                .iter()
                .filter(move |address| address.ip.is_ipv4() == v4 && Some(*address) != first)
        };
        let in_order: Vec<_> = first
            .into_iter()
            .chain(others(true))
            .chain(others(false))
            .collect();
        for version in table.versions() {
            for address in &in_order {
                let entry = GidEntry::new(*version, address.ip);
                if address.usable {
                    table.insert(entry);
                } else if table.entries.len() < GID_TABLE_LEN && (Some(*address) == first || table.with_v1) {
                    // Without v1 entries to come behind them, others can as well take the end later.
                    table.reserved.push((table.entries.len(), entry));
                    table.entries.push(None);
                }
            }
        }
        table.trim();
        table
    }

    /// The table that an earlier daemon had, with these addresses now. A program tells it: only the order counts.
    pub fn restored(entries: &[Option<GidEntry>], addresses: &[Address], mode: LinkMode) -> Self {
        let mut table = Self {
            with_v1: mode.has_roce_v1(),
            ..Self::default()
        };
        let spoken = |entry: &GidEntry| table.versions().contains(&entry.version);
        let own = |entry: &Option<GidEntry>| {
            entry
                .filter(spoken)
                .map(|entry| GidEntry::new(entry.version, entry.addr))
        };
        table.entries = entries.iter().take(GID_TABLE_LEN).map(own).collect();
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
        self.reserved
            .retain(|(_, entry)| addresses.iter().any(|address| address.ip == entry.addr));
        for version in self.versions() {
            let (v4, v6): (Vec<_>, Vec<_>) = addresses
                .iter()
                .filter(|address| address.usable)
                .map(|address| GidEntry::new(*version, address.ip))
                .partition(|entry| entry.addr.is_ipv4());
            for entry in v4.into_iter().chain(v6) {
                self.insert(entry);
            }
        }
        self.trim();
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

    /// What the device speaks, in the order of a new table.
    fn versions(&self) -> &'static [RoceVersion] {
        if self.with_v1 {
            &[RoceVersion::V2, RoceVersion::V1]
        } else {
            &[RoceVersion::V2]
        }
    }

    /// Puts an entry that the table has not yet where a place waits for it, else into the first hole, else at the end.
    fn insert(&mut self, entry: GidEntry) {
        if self.entries.contains(&Some(entry)) {
            return;
        }
        let own = self.reserved.iter().position(|(_, waits)| *waits == entry);
        let place = match own {
            Some(at) => Some(self.reserved.swap_remove(at).0),
            None => (0..self.entries.len()).find(|&index| {
                self.entries[index].is_none() && self.reserved.iter().all(|(taken, _)| *taken != index)
            }),
        };
        match place {
            Some(index) => self.entries[index] = Some(entry),
            None if self.entries.len() < GID_TABLE_LEN => self.entries.push(Some(entry)),
            None => warn!(ip = %entry.addr, "GID table is full, the address is left out"),
        }
    }

    /// Drops the holes at the end, but for those that wait for an address.
    fn trim(&mut self) {
        let waiting = self
            .reserved
            .iter()
            .map(|(index, _)| index + 1)
            .max()
            .unwrap_or(0);
        while self.entries.len() > waiting && self.entries.last() == Some(&None) {
            self.entries.pop();
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
    use ferroce_engine::control::XdpInfo;

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

    /// The table of a device that speaks v2 alone.
    fn v2_table(text: &[&str]) -> GidTable {
        GidTable::new(&addresses(text), LinkMode::Udp)
    }

    fn xdp() -> LinkMode {
        LinkMode::Xdp(XdpInfo::default())
    }

    /// The table of a device that speaks both.
    fn table_of_both(text: &[&str]) -> GidTable {
        GidTable::new(&addresses(text), xdp())
    }

    fn shown(table: &GidTable) -> Vec<String> {
        table
            .entries()
            .iter()
            .map(|entry| {
                entry.map_or("-".into(), |entry| match entry.version {
                    RoceVersion::V1 => format!("{} v1", entry.addr),
                    RoceVersion::V2 => entry.addr.to_string(),
                })
            })
            .collect()
    }

    #[test]
    fn new_table_has_link_local_then_v4_then_v6() {
        let table = v2_table(&["2001:db8::1", "10.0.0.1", "fe80::2", "10.0.0.2", "fe80::3"]);
        assert_eq!(
            shown(&table),
            ["fe80::2", "10.0.0.1", "10.0.0.2", "2001:db8::1", "fe80::3"]
        );
        assert_eq!(shown(&v2_table(&["::1", "127.0.0.1"])), ["127.0.0.1", "::1"]);
    }

    #[test]
    fn holes_are_kept_and_filled_by_the_next() {
        let mut table = v2_table(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
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
        let mut table = v2_table(&["fe80::1 tentative", "2001:db8::1 tentative", "10.0.0.1"]);
        assert_eq!(shown(&table), ["-", "10.0.0.1"]);
        table.follow(&addresses(&["fe80::1 tentative", "2001:db8::1", "10.0.0.1"]));
        assert_eq!(shown(&table), ["-", "10.0.0.1", "2001:db8::1"]);
        table.follow(&addresses(&["fe80::1", "2001:db8::1", "10.0.0.1"]));
        assert_eq!(shown(&table), ["fe80::1", "10.0.0.1", "2001:db8::1"]);
    }

    #[test]
    fn failed_link_local_gives_its_index_up() {
        let mut table = v2_table(&["fe80::1 tentative"]);
        assert!(shown(&table).is_empty());
        table.follow(&addresses(&["10.0.0.1"]));
        assert_eq!(shown(&table), ["10.0.0.1"]);
    }

    #[test]
    fn restored_table_keeps_the_order() {
        let mut earlier = v2_table(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
        earlier.follow(&addresses(&["10.0.0.2", "10.0.0.3"]));
        let table = GidTable::restored(
            &earlier.entries(),
            &addresses(&["fe80::1", "10.0.0.3"]),
            LinkMode::Udp,
        );
        assert_eq!(shown(&table), ["fe80::1", "-", "10.0.0.3"]);
        // A GID that is not that of its address is not taken over.
        let mut forged = earlier.entries();
        forged.iter_mut().flatten().for_each(|entry| entry.gid = [7; 16]);
        let restored = GidTable::restored(&forged, &addresses(&["fe80::1", "10.0.0.3"]), LinkMode::Udp);
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
        assert_eq!(GidTable::new(&many, LinkMode::Udp).entries().len(), GID_TABLE_LEN);
    }

    #[test]
    fn v1_entries_stand_behind_those_of_v2() {
        let interface = ["2001:db8::1", "10.0.0.1", "fe80::2"];
        let mut table = table_of_both(&interface);
        let shown_now = shown(&table);
        assert_eq!(shown_now[..3], shown(&v2_table(&interface)));
        assert_eq!(
            shown_now,
            [
                "fe80::2",
                "10.0.0.1",
                "2001:db8::1",
                "fe80::2 v1",
                "10.0.0.1 v1",
                "2001:db8::1 v1"
            ]
        );
        // Both go, and both holes are filled, v2 first.
        assert!(table.follow(&addresses(&["fe80::2", "2001:db8::1"])));
        assert_eq!(
            shown(&table),
            ["fe80::2", "-", "2001:db8::1", "fe80::2 v1", "-", "2001:db8::1 v1"]
        );
        let earlier = table.entries();
        assert!(table.follow(&addresses(&["fe80::2", "2001:db8::1", "10.0.0.9", "10.0.0.8"])));
        let after = [
            "fe80::2",
            "10.0.0.9",
            "2001:db8::1",
            "fe80::2 v1",
            "10.0.0.8",
            "2001:db8::1 v1",
            "10.0.0.9 v1",
            "10.0.0.8 v1",
        ];
        assert_eq!(shown(&table), after);

        let now = addresses(&["fe80::2", "2001:db8::1", "10.0.0.9", "10.0.0.8"]);
        let restored = GidTable::restored(&table.entries(), &now, xdp());
        assert_eq!(shown(&restored), after);
        // A device that was in XDP mode, and is not any more.
        let plain = GidTable::restored(&earlier, &addresses(&["fe80::2", "2001:db8::1"]), LinkMode::Udp);
        assert_eq!(shown(&plain), ["fe80::2", "-", "2001:db8::1"]);
    }

    #[test]
    fn addresses_under_detection_keep_their_places_for_both_versions() {
        let mut table = table_of_both(&["fe80::1 tentative", "2001:db8::1 tentative", "10.0.0.1"]);
        assert_eq!(shown(&table), ["-", "10.0.0.1", "-", "-", "10.0.0.1 v1"]);
        assert!(table.follow(&addresses(&[
            "fe80::1",
            "2001:db8::1 tentative",
            "10.0.0.1",
            "10.0.0.2"
        ])));
        assert!(!table.follow(&addresses(&[
            "fe80::1",
            "2001:db8::1 tentative",
            "10.0.0.1",
            "10.0.0.2"
        ])));
        table.follow(&addresses(&["fe80::1", "2001:db8::1", "10.0.0.1", "10.0.0.2"]));
        assert_eq!(
            shown(&table),
            [
                "fe80::1",
                "10.0.0.1",
                "2001:db8::1",
                "fe80::1 v1",
                "10.0.0.1 v1",
                "2001:db8::1 v1",
                "10.0.0.2",
                "10.0.0.2 v1"
            ]
        );
        // Detection that fails gives them up.
        let mut table = table_of_both(&["fe80::1 tentative", "10.0.0.1"]);
        assert!(table.follow(&addresses(&["10.0.0.1", "10.0.0.2"])));
        assert_eq!(
            shown(&table),
            ["10.0.0.2", "10.0.0.1", "10.0.0.2 v1", "10.0.0.1 v1"]
        );
    }
}

//! The two ends of a path, as an address vector names them by GIDs.

use std::net::IpAddr;

use ferroce_wire::Gid;

use super::multicast;
use crate::control::{DeviceInfo, GidEntry};
use crate::link::RoceVersion;
use crate::verbs::VerbsError;

/// Where a path begins and ends, and by which version packets travel on it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ends {
    pub version: RoceVersion,
    pub source: IpAddr,
    pub dest: IpAddr,
}

/// From the GID with that index to `dgid`.
///
/// `Invalid` if the index holds nothing, if the GIDs are of two IP versions (but packets to a multicast group can leave
/// from any GID that is of its version), if the destination is no address, or a group and the GID one of RoCE v1.
pub(super) fn of(info: &DeviceInfo, sgid_index: u8, dgid: Gid) -> Result<Ends, VerbsError> {
    let entry = info.gids.get(usize::from(sgid_index)).and_then(Option::as_ref);
    let &GidEntry { addr, version, .. } = entry.ok_or(VerbsError::Invalid)?;
    let (source, dest) = match dgid.multicast_group() {
        Some(_) if version == RoceVersion::V1 => return Err(VerbsError::Invalid),
        Some(group) if addr.is_ipv4() != group.is_ipv4() => {
            (multicast::source(info, group).ok_or(VerbsError::Invalid)?, group)
        }
        Some(group) => (addr, group),
        None => (addr, dgid.to_ip()),
    };
    if source.is_ipv4() != dest.is_ipv4() || dest.is_unspecified() {
        return Err(VerbsError::Invalid);
    }
    Ok(Ends {
        version,
        source,
        dest,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::RoceVersion::{V1, V2};

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn device() -> DeviceInfo {
        let entry = |version, address| Some(GidEntry::new(version, ip(address)));
        DeviceInfo {
            gids: vec![
                entry(V2, "fe80::1"),
                entry(V2, "10.0.0.1"),
                None,
                entry(V1, "fe80::1"),
                entry(V1, "10.0.0.1"),
            ],
            ..DeviceInfo::default()
        }
    }

    fn ends(sgid_index: u8, dgid: &str) -> Result<(RoceVersion, IpAddr, IpAddr), VerbsError> {
        of(&device(), sgid_index, Gid::from_ip(ip(dgid))).map(|ends| (ends.version, ends.source, ends.dest))
    }

    #[test]
    fn the_gid_tells_the_version() {
        for (index, version, source, dest) in [
            (0, V2, "fe80::1", "fe80::2"),
            (1, V2, "10.0.0.1", "10.0.0.2"),
            (3, V1, "fe80::1", "fe80::2"),
            (4, V1, "10.0.0.1", "10.0.0.2"),
        ] {
            assert_eq!(ends(index, dest), Ok((version, ip(source), ip(dest))));
        }
    }

    #[test]
    fn gids_of_nothing_and_of_two_kinds_are_refused() {
        for (index, dest) in [
            (2, "10.0.0.2"),
            (5, "10.0.0.2"),
            (255, "10.0.0.2"),
            (0, "10.0.0.2"),
            (1, "fe80::2"),
            (3, "10.0.0.2"),
            (4, "fe80::2"),
            (0, "::"),
            (4, "0.0.0.0"),
        ] {
            assert_eq!(ends(index, dest), Err(VerbsError::Invalid), "{index} {dest}");
        }
    }

    #[test]
    fn groups_are_reached_over_v2_alone() {
        assert_eq!(ends(1, "239.1.2.3"), Ok((V2, ip("10.0.0.1"), ip("239.1.2.3"))));
        // Any GID stands for that of the group's own IP version.
        assert_eq!(ends(0, "239.1.2.3"), Ok((V2, ip("10.0.0.1"), ip("239.1.2.3"))));
        assert_eq!(ends(1, "ff0e::5"), Ok((V2, ip("fe80::1"), ip("ff0e::5"))));
        for (index, dest) in [
            (3, "ff0e::5"),
            (4, "239.1.2.3"),
            (4, "ff0e::5"),
            (4, "ff0e::ffff:ef01:203"),
        ] {
            assert_eq!(ends(index, dest), Err(VerbsError::Invalid), "{index} {dest}");
        }
    }
}

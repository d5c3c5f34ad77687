//! The UDP ports of RoCEv2, and the source port that spreads flows (reference section 10).

/// The UDP destination port of every RoCEv2 packet.
pub const ROCE_V2_PORT: u16 = 4791;

/// The lowest source port that senders choose. Receivers must accept any.
pub const MIN_SOURCE_PORT: u16 = 0xc000;

/// A 20-bit flow label for a connection whose address handle gives none, from the two QPNs.
/// The order of the two does not matter, so both directions have the same label.
pub const fn flow_label(local_qpn: u32, remote_qpn: u32) -> u32 {
    let mut v = (local_qpn as u64 & 0xff_ffff) * (remote_qpn as u64 & 0xff_ffff);
    v ^= v >> 20;
    v ^= v >> 40;
    v as u32 & 0xf_ffff
}

/// The source port of a 20-bit flow label, [`MIN_SOURCE_PORT`] to 65535.
pub const fn source_port(flow_label: u32) -> u16 {
    (flow_label & 0x3fff ^ (flow_label & 0xf_c000) >> 14) as u16 | MIN_SOURCE_PORT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_queue_pairs() {
        assert_eq!(flow_label(0x11, 0x11), 0x121);
        assert_eq!(source_port(flow_label(0x11, 0x11)), 0xc121);
        assert_eq!(flow_label(0x12_3456, 0x65_4321), flow_label(0x65_4321, 0x12_3456));
        assert!(flow_label(0xff_ffff, 0xff_fffe) <= 0xf_ffff);
    }

    #[test]
    fn folds_the_upper_bits() {
        assert_eq!(source_port(0x4000), 0xc001);
        assert_eq!(source_port(0xf_ffff), 0xffff ^ 0x3f);
        assert_eq!(source_port(0), 0xc000);
    }
}

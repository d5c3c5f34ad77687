//! Any bytes: parsing never panics, and what is built parses to what it was built from.

use ferroce_wire::cm::{CmMad, CmMessage, IpHeader, IpPair};
use ferroce_wire::datagram::Udp;
use ferroce_wire::frame::{Ethernet, Vlan};
use ferroce_wire::grh::GrhIpv4;
use ferroce_wire::mad::MadHeader;
use ferroce_wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Datagram, Deth, Feth, Frame, Gid, Grh, GrhArea, Headers, IdRecovery,
    Ieth, ImmDt, Network, Opcode, Psn, Reth, RocePacket, Syndrome, XrcEth, aeth, frame, icrc,
};
use proptest::prelude::*;

fn opcode() -> impl Strategy<Value = Opcode> {
    prop::sample::select(Opcode::ALL)
}

prop_compose! {
    fn bth()(
        opcode in opcode(),
        flags in any::<[bool; 5]>(),
        pad in 0..4u8,
        version in 0..16u8,
        pkey: u16,
        reserved in 0..64u8,
        dest_qpn in 0..1u32 << 24,
        reserved_psn in 0..128u8,
        psn: u32,
    ) -> Bth {
        let [solicited, migration, fecn, becn, ack_request] = flags;
        let psn = Psn::new(psn);
        Bth { opcode, solicited, migration, pad, version, pkey, fecn, becn, reserved, dest_qpn,
            ack_request, reserved_psn, psn }
    }
}

prop_compose! {
    fn headers()(
        bth in bth(),
        words in any::<[u32; 6]>(),
        quads in any::<[u64; 5]>(),
        syndrome: u8,
        placement in 0..16u8,
        selectivity in 0..4u8,
    ) -> Headers {
        let low24 = |word| word & 0xff_ffff;
        Headers {
            bth,
            xrceth: XrcEth { srqn: low24(words[0]) },
            deth: Deth { qkey: words[1], src_qpn: low24(words[2]) },
            feth: Feth { placement, selectivity },
            reth: Reth { va: quads[0], rkey: words[3], dma_len: words[4] },
            atomic_eth: AtomicEth { va: quads[1], rkey: words[3], swap_add: quads[2], compare: quads[3] },
            aeth: Aeth { syndrome: Syndrome::from_u8(syndrome), msn: low24(words[0]) },
            atomic_ack_eth: AtomicAckEth { original: quads[4] },
            immdt: ImmDt { data: words[5].to_be_bytes() },
            ieth: Ieth { rkey: words[5] },
        }
    }
}

fn network() -> impl Strategy<Value = Network> {
    let udp = || any::<(u16, u16)>().prop_map(|(src_port, checksum)| Udp { src_port, checksum });
    let v4 = (any::<(u8, u16, bool, u8, [u8; 4], [u8; 4])>(), udp()).prop_map(
        |((tos, id, dont_fragment, ttl, src, dst), udp)| Network::Ipv4 {
            tos,
            id,
            dont_fragment,
            ttl,
            src: src.into(),
            dst: dst.into(),
            udp,
        },
    );
    let v6 = (any::<(u8, u8, [u8; 16], [u8; 16])>(), 0..1u32 << 20, udp()).prop_map(
        |((traffic_class, hop_limit, src, dst), flow_label, udp)| Network::Ipv6 {
            traffic_class,
            flow_label,
            hop_limit,
            src: src.into(),
            dst: dst.into(),
            udp,
        },
    );
    prop_oneof![v4, v6, grh().prop_map(Network::Grh)]
}

prop_compose! {
    fn grh()(
        (traffic_class, payload_len, next_header, hop_limit) in any::<(u8, u16, u8, u8)>(),
        flow_label in 0..1u32 << 20,
        sgid: [u8; 16],
        dgid: [u8; 16],
    ) -> Grh {
        let (sgid, dgid) = (Gid(sgid), Gid(dgid));
        Grh { traffic_class, flow_label, payload_len, next_header, hop_limit, sgid, dgid }
    }
}

prop_compose! {
    fn ethernet()(
        dst: [u8; 6],
        src: [u8; 6],
        vlan in prop::option::of((0..8u8, any::<bool>(), 0..4096u16)),
    ) -> Ethernet {
        let vlan = vlan.map(|(priority, drop_eligible, id)| Vlan { priority, drop_eligible, id });
        Ethernet { dst, src, vlan }
    }
}

/// The attribute ids of CM, and one that is none.
fn attribute_id() -> impl Strategy<Value = u16> {
    0x10..0x1c_u16
}

/// Calls everything that reads bytes, on these.
fn read_all(bytes: &[u8]) {
    let look = |packet: RocePacket<'_>| {
        let _ = (
            packet.headers(),
            packet.payload(),
            packet.covered(),
            packet.icrc(),
        );
        assert!(packet.header_bytes().len() + packet.payload().len() + 4 <= bytes.len());
    };
    if let Ok(packet) = RocePacket::parse(bytes) {
        look(packet);
    }
    if let Ok(frame) = Frame::parse(bytes) {
        look(frame.datagram.packet);
        let _ = frame.datagram.verify();
    }
    if let Ok(datagram) = Datagram::parse(bytes) {
        look(datagram.packet);
        let _ = datagram.verify();
    }
    let _ = (icrc::compute(bytes), icrc::verify(bytes));
    let _ = (
        Bth::parse(bytes),
        Deth::parse(bytes),
        Reth::parse(bytes),
        AtomicEth::parse(bytes),
    );
    let _ = (
        Aeth::parse(bytes),
        AtomicAckEth::parse(bytes),
        ImmDt::parse(bytes),
    );
    let _ = (Ieth::parse(bytes), XrcEth::parse(bytes), Feth::parse(bytes));
    let _ = (
        Grh::parse(bytes),
        GrhArea::parse(bytes),
        Ethernet::parse(bytes),
        Network::parse(bytes),
    );
    let _ = (
        MadHeader::parse(bytes),
        CmMad::parse(bytes),
        IpHeader::parse(bytes),
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        read_all(&bytes);
    }

    /// Bytes that get past the first checks: a frame that is right but for some bytes.
    #[test]
    fn nearly_right_bytes_are_read(
        (ethernet, network, headers) in (ethernet(), network(), headers()),
        payload in prop::collection::vec(any::<u8>(), 0..60),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = vec![0; 300];
        let len = frame::build(&ethernet, &network, &headers, &payload, &mut bytes).unwrap();
        bytes.truncate(len);
        for (at, value) in changes {
            let at = at.index(len);
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(len));
        }
        for start in [0, ethernet.header_len(), ethernet.header_len() + network.header_len()] {
            read_all(bytes.get(start..).unwrap_or_default());
        }
    }

    #[test]
    fn bth_survives(bth in bth()) {
        prop_assert_eq!(Bth::parse(&bth.to_bytes()), Ok(bth));
    }

    /// Ethernet to ICRC: built, taken, verified, and the same again.
    #[test]
    fn frames_survive(
        (ethernet, network, headers) in (ethernet(), network(), headers()),
        payload in prop::collection::vec(any::<u8>(), 0..1100),
    ) {
        let mut bytes = vec![0; 1300];
        let len = frame::build(&ethernet, &network, &headers, &payload, &mut bytes).unwrap();
        // Bytes after the packet are no part of it.
        let frame = Frame::parse(&bytes[..len + 1]).unwrap();
        prop_assert_eq!(frame.ethernet, ethernet);
        prop_assert_eq!(frame.datagram.verify(), Ok(()));
        prop_assert_eq!(frame.datagram.packet.payload(), &payload[..]);
        prop_assert_eq!(frame.datagram.packet.bth().pad as usize, payload.len().wrapping_neg() % 4);
        match (frame.datagram.network, network) {
            (Network::Grh(got), Network::Grh(sent)) => {
                let lens = (got.payload_len, got.next_header);
                prop_assert_eq!(lens, ((len - ethernet.header_len() - Grh::LEN) as u16, 0x1b));
                let sent = Grh { payload_len: lens.0, next_header: lens.1, ..sent };
                prop_assert_eq!(got, sent);
            }
            (got, sent) => prop_assert_eq!(got, sent),
        }
        let again = frame.datagram.packet.headers();
        let mut rebuilt = vec![0; len];
        let packet = frame.datagram.packet;
        frame::build(&ethernet, &frame.datagram.network, &again, packet.payload(), &mut rebuilt)
            .unwrap();
        prop_assert_eq!(&rebuilt[..], &bytes[..len]);
        // A byte less room is an error, not a panic.
        prop_assert!(frame::build(&ethernet, &network, &headers, &payload, &mut rebuilt[1..]).is_err());
    }

    #[test]
    fn cm_messages_survive(
        id in attribute_id(),
        data in prop::collection::vec(any::<u8>(), 0..300),
        tid: u64,
        attribute_modifier: u32,
    ) {
        if let Ok(message) = CmMessage::parse(id, &data) {
            prop_assert!(data.len() >= 232 && message.attribute_id() == id);
            prop_assert_eq!(CmMessage::parse(id, &message.to_bytes()), Ok(message));
            let mad = CmMad { tid, attribute_modifier, message };
            prop_assert_eq!(CmMad::parse(&mad.to_bytes()), Ok(mad));
        } else {
            prop_assert!(data.len() < 232 || id == 0x1b);
        }
    }

    #[test]
    fn ip_headers_survive(src_port: u16, src: [u8; 16], dst: [u8; 16], v4: bool) {
        let addrs = if v4 {
            let last4 = |b: [u8; 16]| [b[12], b[13], b[14], b[15]].into();
            IpPair::V4(last4(src), last4(dst))
        } else {
            IpPair::V6(src.into(), dst.into())
        };
        let header = IpHeader { src_port, addrs };
        prop_assert_eq!(IpHeader::parse(&header.to_bytes()), Ok(header));
    }

    #[test]
    fn mad_headers_survive(bytes: [u8; 18], attribute_modifier: u32) {
        let mut padded = [0; MadHeader::LEN];
        padded[..18].copy_from_slice(&bytes);
        padded[20..].copy_from_slice(&attribute_modifier.to_be_bytes());
        prop_assert_eq!(MadHeader::parse(&padded).unwrap().to_bytes(), padded);
    }

    #[test]
    fn grh_areas_survive(
        grh in grh(),
        (tos, total_len, id, dont_fragment, ttl) in any::<(u8, u16, u16, bool, u8)>(),
        (src, dst) in any::<([u8; 4], [u8; 4])>(),
    ) {
        let (src, dst) = (src.into(), dst.into());
        let v4 = GrhArea::V4(GrhIpv4 { tos, total_len, id, dont_fragment, ttl, src, dst });
        prop_assert_eq!(GrhArea::parse(&v4.to_bytes()), Ok(v4));
        let v6 = GrhArea::V6(grh);
        prop_assert_eq!(GrhArea::parse(&v6.to_bytes()), Ok(v6));
    }

    #[test]
    fn psn_arithmetic(a: u32, b: u32, n in 0..1u32 << 23) {
        let (a, b) = (Psn::new(a), Psn::new(b));
        prop_assert_eq!(b.add(a.distance(b) as u32), a);
        prop_assert_eq!(a.add(n).sub(n), a);
        prop_assert_eq!(a.add(n).distance(a), n as i32);
        prop_assert_eq!(a.add(n).is_after(a), n > 0);
        prop_assert!(!(a.is_after(b) && a.is_before(b)));
    }

    #[test]
    fn credits_never_promise_more(receives: u32) {
        let code = aeth::encode_credits(receives);
        prop_assert!(aeth::credits(code).unwrap() <= receives);
        if code < 30 {
            prop_assert!(aeth::credits(code + 1).unwrap() > receives);
        }
    }

    /// The id of any packet comes out of its ICRC.
    #[test]
    fn ids_are_recovered(network in network(), payload in prop::collection::vec(any::<u8>(), 0..600)) {
        let Network::Ipv4 { id, .. } = network else { return Ok(()) };
        let mut bytes = vec![0; 700];
        let headers = Headers::new(Opcode::RcSendOnly, 17, Psn::new(5));
        let len = ferroce_wire::datagram::build(&network, &headers, &payload, &mut bytes).unwrap();
        let received = Datagram::parse(&bytes[..len]).unwrap().packet.icrc();
        bytes[4..6].fill(0);
        let computed = icrc::compute(&bytes[..len]).unwrap();
        let recovery = IdRecovery::for_total_len(len as u16);
        prop_assert_eq!(recovery.recover(received, computed), Some(id));
    }
}

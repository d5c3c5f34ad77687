//! The program: which frames go to the sockets of a seat, which are dropped, and which the kernel gets.
//!
//! It looks no further than it must: what is not surely RoCE for an address of the device is the kernel's.

use super::insn::{AssembleError, Assembler, If, Insn, Label, Op, Reg, Reg::*, Size};

/// Verdicts of `linux/bpf.h`.
pub const XDP_DROP: i32 = 1;
/// See [`XDP_DROP`].
pub const XDP_PASS: i32 = 2;
/// See [`XDP_DROP`].
pub const XDP_REDIRECT: i32 = 4;

/// Helpers of `linux/bpf.h`.
const MAP_LOOKUP_ELEM: i32 = 1;
const REDIRECT_MAP: i32 = 51;
const XDP_GET_BUFF_LEN: i32 = 188;

/// Fields of `struct xdp_md`.
const DATA: i16 = 0;
const DATA_END: i16 = 4;
const RX_QUEUE_INDEX: i16 = 16;

/// Values of the map of slots; anything else is a seat.
pub const NOBODY: u32 = 0;
/// See [`NOBODY`].
pub const KERNEL: u32 = 1;
/// See [`NOBODY`].
pub const SEAT: u32 = 2;

/// Keys of the map of counters: why a frame was dropped.
pub const UNOWNED: u32 = 0;
/// See [`UNOWNED`].
pub const LENGTH: u32 = 1;
/// See [`UNOWNED`].
pub const NO_SOCKET: u32 = 2;
/// Number of counters.
pub const REASONS: u32 = 3;

/// Slots that there can be: the values of the byte that names one.
pub const SLOTS: u32 = 256;

const ETHERNET: i16 = 14;
const VLAN: i32 = 4;
const IPV4: i16 = 20;
const IPV6: i16 = 40;
const UDP: i16 = 8;
const UDP_CHECKSUM: i16 = 6;
const BTH: i16 = 12;
const ICRC: i16 = 4;
/// Of the BTH: the high byte of the destination queue pair's number, which is the slot.
const SLOT_IN_BTH: i16 = 5;
const ROCE_PORT: i32 = 4791;
/// More fragments, or a fragment's offset.
const FRAGMENT: i32 = 0x3fff;
const NEXT_HEADER_UDP: i32 = 17;
const NEXT_HEADER_IBA: i32 = 0x1b;

/// What stays in registers while helpers are called: the context, and first and last byte of the frame ...
const CTX: Reg = R6;
/// ... as if no tag were in it ...
const FRAME: Reg = R7;
const END: Reg = R8;
/// ... and how many bytes of it its IP header tells of; later, how it travelled.
const LEN: Reg = R9;
const KIND: Reg = R9;

/// Values of [`KIND`]: RoCE v2 without a UDP checksum, ...
const V2: i32 = 0;
/// ... RoCE v1, ...
const V1: i32 = 1;
/// ... and RoCE v2 with one. NICs leave it out; it comes from a UDP socket, and on virtual interfaces may then be several
/// packets that the sender's kernel has left whole (GSO). Only the kernel can divide them, so a seat gets all of this kind
/// by its UDP socket, in their order.
const V2_OF_SOCKET: i32 = 2;

/// On the stack: an address of 16 bytes, a number, and the bytes of the tag.
const ADDRESS: i16 = -16;
const NUMBER: i16 = -20;
const TAG: i16 = -24;

/// Addresses that are compared before the map of all of them is asked, which takes as long as all the rest.
pub const FIRST: u32 = 4;
/// Bytes of one in the maps.
pub const ADDRESS_LEN: u32 = 16;

/// The descriptors of the maps.
#[derive(Clone, Copy, Debug)]
pub struct MapFds {
    /// XSKMAP, by queue * 256 + slot.
    pub sockets: i32,
    /// What becomes of packets for a slot, by slot.
    pub slots: i32,
    /// The device's addresses, IPv4 ones mapped.
    pub addresses: i32,
    /// The [`FIRST`] of these, one behind the other.
    pub first: i32,
    /// Counters by reason.
    pub drops: i32,
}

/// The program for an interface of which this many queues are served.
pub fn assemble(maps: &MapFds, queues: u16) -> Result<Vec<Insn>, AssembleError> {
    let mut asm = Assembler::default();
    let all = Places {
        pass: asm.label(),
        bad_length: asm.label(),
        slot: asm.label(),
    };
    let (ipv4, ipv6, v1, untagged) = (asm.label(), asm.label(), asm.label(), asm.label());

    asm.mov(CTX, R1);
    asm.store(Size::B4, R10, TAG, 0);
    asm.load(Size::B4, FRAME, CTX, DATA);
    asm.load(Size::B4, END, CTX, DATA_END);
    reach(&mut asm, ETHERNET, all.pass);
    asm.load(Size::B1, R2, FRAME, 0);
    asm.jump_if(If::Set, R2, 1, all.pass);
    asm.load_be16(R2, FRAME, 12);
    asm.jump_if(If::Ne, R2, 0x8100, untagged);
    // A tag of VLAN 0 only has a priority. Those of others belong to interfaces of their own.
    reach(&mut asm, ETHERNET + VLAN as i16, all.pass);
    asm.load_be16(R3, FRAME, ETHERNET);
    asm.jump_if(If::Set, R3, 0xfff, all.pass);
    asm.load_be16(R2, FRAME, ETHERNET + 2);
    asm.op(Op::Add, FRAME, VLAN);
    asm.store(Size::B4, R10, TAG, VLAN);
    asm.here(untagged);
    asm.jump_if(If::Eq, R2, 0x0800, ipv4);
    asm.jump_if(If::Eq, R2, 0x86dd, ipv6);
    asm.jump_if(If::Eq, R2, 0x8915, v1);
    asm.jump(all.pass);

    asm.here(ipv4);
    from_ipv4(&mut asm, maps, &all);
    asm.here(ipv6);
    from_ipv6(&mut asm, maps, &all);
    asm.here(v1);
    from_v1(&mut asm, maps, &all);
    to_slot(&mut asm, maps, queues, &all);
    asm.finish()
}

/// Where the parts of the program meet.
struct Places {
    /// The kernel gets it.
    pass: Label,
    /// It is dropped for its length.
    bad_length: Label,
    /// It goes to the slot in R4.
    slot: Label,
}

/// Nothing of the frame is read before the verifier has seen it compared with the end. Headers lie in the first buffer:
/// those that do not are for the kernel to gather.
fn reach(asm: &mut Assembler, bytes: i16, otherwise: Label) {
    asm.mov(R2, FRAME);
    asm.op(Op::Add, R2, i32::from(bytes));
    asm.jump_if(If::Gt, R2, END, otherwise);
}

/// Goes on if the frame has the bytes in [`LEN`] behind its Ethernet header. One of several buffers, whose end is not that of
/// the first, is measured by the kernel.
fn need_len(asm: &mut Assembler, all: &Places) {
    let enough = asm.label();
    // What the verifier does not know of numbers in network byte order.
    asm.op(Op::And, LEN, 0x1_ffff);
    asm.mov(R3, FRAME);
    asm.op(Op::Add, R3, i32::from(ETHERNET));
    asm.op(Op::Add, R3, LEN);
    asm.jump_if(If::Ge, END, R3, enough);
    asm.mov(R1, CTX);
    asm.call(XDP_GET_BUFF_LEN);
    asm.op(Op::Sub, R0, i32::from(ETHERNET));
    asm.load(Size::B4, R1, R10, TAG);
    asm.op(Op::Sub, R0, R1);
    asm.jump_if(If::Gt, LEN, R0, all.bad_length);
    asm.here(enough);
}

/// Goes on if the address on the stack is one of the device's. Groups are not among these.
fn need_own_address(asm: &mut Assembler, maps: &MapFds, all: &Places) {
    let own = asm.label();
    asm.load_value(R1, maps.first);
    asm.load(Size::B8, R2, R10, ADDRESS);
    asm.load(Size::B8, R3, R10, ADDRESS + 8);
    for at in (0..FIRST * ADDRESS_LEN).step_by(ADDRESS_LEN as usize) {
        let another = asm.label();
        asm.load(Size::B8, R4, R1, at as i16 + 8);
        asm.jump_if(If::Ne, R4, R3, another);
        asm.load(Size::B8, R4, R1, at as i16);
        asm.jump_if(If::Eq, R4, R2, own);
        asm.here(another);
    }
    asm.load_map(R1, maps.addresses);
    asm.mov(R2, R10);
    asm.op(Op::Add, R2, i32::from(ADDRESS));
    asm.call(MAP_LOOKUP_ELEM);
    asm.jump_if(If::Eq, R0, 0, all.pass);
    asm.here(own);
}

/// Takes the slot out of the BTH there.
fn take_slot(asm: &mut Assembler, bth: i16, kind: i32, all: &Places) {
    reach(asm, bth + BTH, all.pass);
    asm.load(Size::B1, R4, FRAME, bth + SLOT_IN_BTH);
    asm.mov(KIND, kind);
    asm.jump(all.slot);
}

/// As [`take_slot`], behind the UDP header there.
fn take_slot_behind_udp(asm: &mut Assembler, udp: i16, all: &Places) {
    let of_socket = asm.label();
    asm.load_be16(R2, FRAME, udp + UDP_CHECKSUM);
    asm.jump_if(If::Ne, R2, 0, of_socket);
    take_slot(asm, udp + UDP, V2, all);
    asm.here(of_socket);
    take_slot(asm, udp + UDP, V2_OF_SOCKET, all);
}

fn from_ipv4(asm: &mut Assembler, maps: &MapFds, all: &Places) {
    let udp = ETHERNET + IPV4;
    reach(asm, udp + UDP, all.pass);
    asm.load(Size::B1, R2, FRAME, ETHERNET);
    // Version 4, and a header without options.
    asm.jump_if(If::Ne, R2, 0x45, all.pass);
    asm.load(Size::B1, R2, FRAME, ETHERNET + 9);
    asm.jump_if(If::Ne, R2, NEXT_HEADER_UDP, all.pass);
    asm.load_be16(R2, FRAME, ETHERNET + 6);
    asm.jump_if(If::Set, R2, FRAGMENT, all.pass);
    asm.load_be16(R2, FRAME, udp + 2);
    asm.jump_if(If::Ne, R2, ROCE_PORT, all.pass);
    // The address as IPv6 maps it: ::ffff:a.b.c.d.
    asm.store(Size::B8, R10, ADDRESS, 0);
    asm.store(Size::B4, R10, ADDRESS + 8, MAPPED);
    asm.load(Size::B4, R2, FRAME, ETHERNET + 16);
    asm.store(Size::B4, R10, ADDRESS + 12, R2);
    need_own_address(asm, maps, all);
    asm.load_be16(LEN, FRAME, ETHERNET + 2);
    need_len(asm, all);
    asm.load_be16(R3, FRAME, udp + 4);
    asm.jump_if(If::Lt, R3, i32::from(UDP + BTH + ICRC), all.bad_length);
    asm.op(Op::Sub, LEN, i32::from(IPV4));
    asm.jump_if(If::Ne, LEN, R3, all.bad_length);
    take_slot_behind_udp(asm, udp, all);
}

/// The third word of a mapped IPv4 address.
const MAPPED: i32 = 0x0000_ffff_u32.to_be() as i32;

fn from_ipv6(asm: &mut Assembler, maps: &MapFds, all: &Places) {
    let udp = ETHERNET + IPV6;
    reach(asm, udp + UDP, all.pass);
    let native = asm.label();
    need_version_6(asm, NEXT_HEADER_UDP, all);
    asm.load_be16(R2, FRAME, udp + 2);
    asm.jump_if(If::Ne, R2, ROCE_PORT, all.pass);
    copy_destination(asm);
    // No IPv6 packet goes to a mapped address, and none shall pass for one of IPv4.
    asm.load(Size::B8, R2, R10, ADDRESS);
    asm.jump_if(If::Ne, R2, 0, native);
    asm.load(Size::B4, R2, R10, ADDRESS + 8);
    asm.mov(R3, MAPPED);
    asm.op(Op::Shl, R3, 32);
    asm.op(Op::Shr, R3, 32);
    asm.jump_if(If::Eq, R2, R3, all.pass);
    asm.here(native);
    need_own_address(asm, maps, all);
    asm.load_be16(R2, FRAME, ETHERNET + 4);
    asm.load_be16(R3, FRAME, udp + 4);
    asm.jump_if(If::Lt, R3, i32::from(UDP + BTH + ICRC), all.bad_length);
    asm.jump_if(If::Ne, R2, R3, all.bad_length);
    asm.mov(LEN, R2);
    asm.op(Op::Add, LEN, i32::from(IPV6));
    need_len(asm, all);
    take_slot_behind_udp(asm, udp, all);
}

/// RoCE v1 has a GRH, which is like an IPv6 header, and behind it at once the BTH.
fn from_v1(asm: &mut Assembler, maps: &MapFds, all: &Places) {
    reach(asm, ETHERNET + IPV6, all.pass);
    need_version_6(asm, NEXT_HEADER_IBA, all);
    copy_destination(asm);
    need_own_address(asm, maps, all);
    asm.load_be16(LEN, FRAME, ETHERNET + 4);
    asm.jump_if(If::Lt, LEN, i32::from(BTH + ICRC), all.bad_length);
    asm.op(Op::Add, LEN, i32::from(IPV6));
    need_len(asm, all);
    take_slot(asm, ETHERNET + IPV6, V1, all);
}

fn need_version_6(asm: &mut Assembler, next_header: i32, all: &Places) {
    asm.load(Size::B1, R2, FRAME, ETHERNET);
    asm.op(Op::Shr, R2, 4);
    asm.jump_if(If::Ne, R2, 6, all.pass);
    asm.load(Size::B1, R2, FRAME, ETHERNET + 6);
    asm.jump_if(If::Ne, R2, next_header, all.pass);
}

fn copy_destination(asm: &mut Assembler) {
    asm.load(Size::B8, R2, FRAME, ETHERNET + 24);
    asm.store(Size::B8, R10, ADDRESS, R2);
    asm.load(Size::B8, R2, FRAME, ETHERNET + 32);
    asm.store(Size::B8, R10, ADDRESS + 8, R2);
}

fn to_slot(asm: &mut Assembler, maps: &MapFds, queues: u16, all: &Places) {
    let (kernel, unowned, count, drop, exit) =
        (asm.label(), asm.label(), asm.label(), asm.label(), asm.label());
    asm.here(all.slot);
    asm.store(Size::B4, R10, NUMBER, R4);
    lookup_number(asm, maps.slots);
    asm.jump_if(If::Eq, R0, 0, unowned);
    asm.load(Size::B4, R1, R0, 0);
    asm.jump_if(If::Eq, R1, NOBODY as i32, unowned);
    asm.jump_if(If::Eq, R1, KERNEL as i32, kernel);
    asm.jump_if(If::Eq, KIND, V2_OF_SOCKET, all.pass);
    // Of queues that are not served the kernel takes the packets to the seat's UDP socket.
    asm.load(Size::B4, R2, CTX, RX_QUEUE_INDEX);
    asm.jump_if(If::Ge, R2, i32::from(queues), kernel);
    asm.op(Op::Shl, R2, 8);
    asm.load(Size::B4, R3, R10, NUMBER);
    asm.op(Op::Or, R2, R3);
    asm.load_map(R1, maps.sockets);
    // What the helper gives where there is no socket.
    asm.mov(R3, XDP_DROP);
    asm.call(REDIRECT_MAP);
    asm.jump_if(If::Eq, R0, XDP_REDIRECT, exit);
    asm.mov(R4, NO_SOCKET as i32);
    asm.jump(count);

    asm.here(kernel);
    asm.jump_if(If::Ne, KIND, V1, all.pass);
    // The kernel knows no RoCE v1.
    asm.here(unowned);
    asm.mov(R4, UNOWNED as i32);
    asm.jump(count);
    asm.here(all.bad_length);
    asm.mov(R4, LENGTH as i32);

    asm.here(count);
    asm.store(Size::B4, R10, NUMBER, R4);
    lookup_number(asm, maps.drops);
    asm.jump_if(If::Eq, R0, 0, drop);
    asm.load(Size::B8, R1, R0, 0);
    asm.op(Op::Add, R1, 1);
    asm.store(Size::B8, R0, 0, R1);
    asm.here(drop);
    asm.mov(R0, XDP_DROP);
    asm.exit();
    asm.here(all.pass);
    asm.mov(R0, XDP_PASS);
    asm.here(exit);
    asm.exit();
}

/// Looks up the number on the stack.
fn lookup_number(asm: &mut Assembler, map: i32) {
    asm.load_map(R1, map);
    asm.mov(R2, R10);
    asm.op(Op::Add, R2, i32::from(NUMBER));
    asm.call(MAP_LOOKUP_ELEM);
}

//! Scripts to begin with for the target `cm`, as `engine/tests/cm_script/mod.rs` reads them.

/// A peer's message: its attribute id from 0x10 on, a number for its fields, and which of our numbers it names.
const REQ: &[u8] = &[0, 0, 0x14, 0, 0];
const MRA: &[u8] = &[0, 1, 0xa0, 0, 0];
const MRA_OF_REP: &[u8] = &[0, 1, 0xa4, 0, 0];
const REJ: &[u8] = &[0, 2, 0xe0, 0, 0];
const REP: &[u8] = &[0, 3, 0x40, 0, 0];
const RTU: &[u8] = &[0, 4, 0, 0, 0];
const DREQ: &[u8] = &[0, 5, 0, 0, 0];
const DREP: &[u8] = &[0, 6, 0, 0, 0];
const SIDR_REQ: &[u8] = &[0, 7, 0, 0, 0];
const SIDR_REP: &[u8] = &[0, 8, 0, 0, 0];
const LAP: &[u8] = &[0, 9, 0, 0, 0];
/// Calls, of the first number that is known.
const REQUEST: &[u8] = &[5, 0, 0x14];
const SIDR_REQUEST: &[u8] = &[6, 100, 3];
const REPLY: &[u8] = &[10, 0, 0x0f];
const READY: &[u8] = &[11, 0, 0];
const REJECT: &[u8] = &[12, 0, 28];
const DELAY: &[u8] = &[13, 0, 0x94];
const DISCONNECT: &[u8] = &[14, 0, 0];
const ANSWER: &[u8] = &[15, 0, 0];
const ESTABLISH: &[u8] = &[16, 0, 0];
const SIDR_REPLY: &[u8] = &[17, 0, 0];
const DESTROY: &[u8] = &[18, 0, 0];
/// To the next deadline.
const WAIT: &[u8] = &[7, 19];
const RESTART: &[u8] = &[8];
const EXPECT: &[u8] = &[9, 200];

/// All of them, by name.
pub fn all() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        (
            "asked",
            [REQ, REPLY, RTU, DREQ, ANSWER, DREQ, WAIT, DESTROY].concat(),
        ),
        (
            "asker",
            [REQUEST, REP, READY, REP, DISCONNECT, DREP, WAIT, DESTROY].concat(),
        ),
        ("crossing", [REQUEST, REP, READY, DISCONNECT, DREQ, DREP].concat()),
        (
            "data-first",
            [REQ, REPLY, ESTABLISH, RTU, LAP, DISCONNECT, WAIT, WAIT].concat(),
        ),
        (
            "patience",
            [REQ, DELAY, REQ, REPLY, MRA_OF_REP, WAIT, RTU].concat(),
        ),
        (
            "patience-of-peer",
            [REQUEST, MRA, WAIT, REP, DELAY, REP, READY].concat(),
        ),
        ("rejected", [REQ, REJECT, REQ, DESTROY, REQ, WAIT].concat()),
        ("rejected-by-peer", [REQUEST, REJ, DESTROY].concat()),
        (
            "destroyed",
            [REQUEST, DESTROY, REP, REQ, REPLY, DESTROY, RTU].concat(),
        ),
        (
            "sidr",
            [SIDR_REQ, SIDR_REPLY, SIDR_REQ, DESTROY, SIDR_REQ].concat(),
        ),
        (
            "sidr-asker",
            [SIDR_REQUEST, WAIT, RESTART, WAIT, SIDR_REP].concat(),
        ),
        (
            "restarts",
            [REQ, RESTART, REPLY, RESTART, EXPECT, RTU, WAIT, REQ].concat(),
        ),
    ]
}

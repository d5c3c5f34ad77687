//! A MAD, or the rest of one after two bytes of attribute id: any message comes out as it went in.
#![no_main]

use ferroce_wire::cm::{CmMad, CmMessage, IpHeader};
use ferroce_wire::mad::MadHeader;
use libfuzzer_sys::fuzz_target;

fn check(message: CmMessage) {
    let id = message.attribute_id();
    assert_eq!(CmMessage::parse(id, &message.to_bytes()), Ok(message));
    let private_data: &[u8] = match &message {
        CmMessage::Req(req) => &req.private_data,
        CmMessage::SidrReq(req) => &req.private_data,
        _ => return,
    };
    if let Ok(header) = IpHeader::parse(private_data) {
        assert_eq!(IpHeader::parse(&header.to_bytes()), Ok(header));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let _ = MadHeader::parse(bytes);
    if let Ok(mad) = CmMad::parse(bytes) {
        assert_eq!(CmMad::parse(&mad.to_bytes()), Ok(mad));
        check(mad.message);
    }
    if let Some((id, data)) = bytes.split_first_chunk()
        && let Ok(message) = CmMessage::parse(u16::from_be_bytes(*id), data)
    {
        check(message);
    }
});

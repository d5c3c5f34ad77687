//! Replays of the captures of tests/golden, in which two Soft-RoCE peers do what `gen` was told, to an engine of ours in
//! the place of either: our responder is given the requests, and its answers are compared with Soft-RoCE's; our
//! requester is given the work and the answers, and its requests are compared. Where ours are others, the case says why.
#![forbid(unsafe_code)]

mod capture;
mod cases;
mod mckey;
mod node;
mod requester;
mod responder;
mod rocev1;
mod script;

use ferroce_engine::link::RoceVersion;

/// Replays every case as it was captured, and those that are not multicast as if their packets had been of RoCE v1; names
/// all that fail.
fn each(replay: fn(&cases::Case, RoceVersion)) {
    let mut failed = Vec::new();
    for case in cases::all() {
        for version in [RoceVersion::V2, RoceVersion::V1] {
            let skipped = version == RoceVersion::V1 && case.capture.contains("multicast");
            if !skipped && std::panic::catch_unwind(|| replay(&case, version)).is_err() {
                failed.push((case.capture, version));
            }
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

#[test]
fn responders_answer_as_captured() {
    each(responder::replay);
}

#[test]
fn requesters_ask_as_captured() {
    each(requester::replay);
}

#[test]
fn every_capture_of_a_transport_has_a_case() {
    let mut names: Vec<String> = std::fs::read_dir(capture::folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| name.strip_suffix(".pcap").map(str::to_string))
        .filter(|name| ["rc-", "uc-", "ud-"].iter().any(|kind| name.starts_with(kind)))
        .collect();
    let mut known: Vec<String> = cases::all()
        .iter()
        .map(|case| case.capture.to_string())
        // Made by another program than `gen`.
        .chain([mckey::CAPTURE.to_string()])
        .collect();
    names.sort();
    known.sort();
    assert_eq!(names, known);
}

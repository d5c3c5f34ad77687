//! `ferroce status`: asking the holders of leases for their reports, and answering with what the daemon itself knows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ferroce_engine::control::Report;
use ferroce_engine::control::protocol::{
    CmProcessStatus, DaemonStatus, MAX_REPORTED_IDS, ProcessStatus, RELEASE, Reply,
};
use ferroce_engine::rdma_cm::IdStatus;

use super::super::port::command_name;
use super::Server;

/// How long a process has to report.
const REPORT_TIME: Duration = Duration::from_millis(200);

/// A `ferroce status` that waits for reports.
pub(super) struct Query {
    id: u32,
    asker: u32,
    pub(super) deadline: Instant,
    missing: BTreeSet<u32>,
    reports: BTreeMap<u32, Report>,
}

impl Query {
    /// The report of a client that is gone is not waited for.
    pub(super) fn forget(&mut self, client: u32) {
        self.missing.remove(&client);
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.missing.is_empty() || self.deadline <= now
    }
}

impl Server {
    pub(super) fn start_query(&mut self, asker: u32) {
        let id = self.new_id();
        let mut missing = BTreeSet::new();
        let leases: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.lease.is_some())
            .map(|(id, _)| *id)
            .collect();
        for holder in leases {
            if let Some(connection) = self.connections.get_mut(&holder)
                && connection.send_if_idle(&Reply::ReportWanted { id })
            {
                missing.insert(holder);
                self.flush(holder);
            }
        }
        let deadline = Instant::now() + REPORT_TIME;
        self.queries.push(Query {
            id,
            asker,
            deadline,
            missing,
            reports: BTreeMap::new(),
        });
    }

    pub(super) fn take_report(&mut self, holder: u32, query: u32, report: Report) {
        // One that comes too late finds no query.
        if let Some(query) = self.queries.iter_mut().find(|open| open.id == query)
            && query.missing.remove(&holder)
        {
            query.reports.insert(holder, report);
        }
    }

    pub(super) fn answer(&mut self, mut query: Query) {
        let mut replies = Vec::new();
        for (id, connection) in &self.connections {
            if let Some(lease) = &connection.lease {
                replies.push(Reply::Process(Box::new(ProcessStatus {
                    slot: lease.slot,
                    device: lease.device.clone(),
                    pid: connection.pid(),
                    command: command_name(connection.pid()),
                    uid: connection.peer.uid,
                    report: query.reports.remove(id),
                })));
            }
        }
        let leased = replies.len() as u32;
        replies.extend(self.cm_processes());
        replies.push(Reply::StatusEnd(DaemonStatus {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            release: RELEASE.to_owned(),
            slots: u32::from(self.slots),
            leased,
            receive_buffer: self.sockets.receive_buffer(),
            counters: self.cm.counters(),
        }));
        if let Some(connection) = self.connections.get_mut(&query.asker) {
            for reply in &replies {
                connection.send(reply);
            }
            self.flush(query.asker);
        }
    }

    /// The ids of RDMA CM, by process.
    fn cm_processes(&self) -> Vec<Reply> {
        let mut by_session: BTreeMap<Option<u32>, Vec<IdStatus>> = BTreeMap::new();
        for id in self.cm.status() {
            // What a process that ended has left is all in one place.
            let session = Some(id.session).filter(|session| self.connections.contains_key(session));
            by_session.entry(session).or_default().push(id);
        }
        let mut replies = Vec::new();
        for (session, ids) in by_session {
            let connection = session.and_then(|session| self.connections.get(&session));
            let pid = connection.map_or(0, |it| it.pid());
            for ids in ids.chunks(MAX_REPORTED_IDS) {
                replies.push(Reply::CmProcess(Box::new(CmProcessStatus {
                    pid,
                    command: command_name(pid),
                    uid: connection.map(|it| it.peer.uid),
                    ids: ids.to_vec(),
                })));
            }
        }
        replies
    }
}

//! What one session of RDMA CM is to be told at once: in one message, or if that is too much in some that may each be the
//! last one.

use std::collections::BTreeMap;
use std::mem;

use ferroce_engine::control::protocol::{CmAnswer, CmNews, MAX_MESSAGE};
use ferroce_engine::rdma_cm::{Event, Id, Keepsake};

/// Bytes of what is counted in one message: half of what one may have.
const MAX_NEWS: usize = MAX_MESSAGE / 2;
/// More than the bytes of a keepsake beside its state.
const KEEPSAKE_HEADER: usize = 16;
/// More than the bytes of an event: its private data is that of a MAD.
const EVENT: usize = 512;

/// What is lined up for a session.
#[derive(Default)]
pub struct News {
    /// What its command gave.
    pub answer: Option<CmAnswer>,
    /// What happened, the oldest first.
    pub events: Vec<Event>,
    /// Only the last state of an id counts.
    pub states: BTreeMap<Id, Option<Vec<u8>>>,
}

/// Messages, the last of which has still room.
struct Messages {
    all: Vec<CmNews>,
    bytes: usize,
}

impl News {
    /// The messages, in the order in which they are to be read: as a rule one. Of several, each has the states of the ids
    /// that its events are about, and the answer comes after all that has no event: if the daemon dies in between, the
    /// next one finds nothing that has come without what it led to.
    pub fn into_messages(mut self) -> Vec<CmNews> {
        let mut messages = Messages {
            all: vec![CmNews::default()],
            bytes: 0,
        };
        let mut told = BTreeMap::new();
        for event in &self.events {
            for id in ids_of(event) {
                told.extend(self.states.remove(&id).map(|state| (id, state)));
            }
        }
        for (id, state) in mem::take(&mut self.states) {
            messages.add(vec![Keepsake { id, state }], None);
        }
        messages.last().answer = self.answer;
        for event in self.events {
            let of_event =
                ids_of(&event).filter_map(|id| told.remove(&id).map(|state| Keepsake { id, state }));
            messages.add(of_event.collect(), Some(event));
        }
        messages.all
    }
}

impl Messages {
    fn last(&mut self) -> &mut CmNews {
        self.all.last_mut().expect("there is always one")
    }

    /// Adds what must not be parted.
    fn add(&mut self, keepsakes: Vec<Keepsake>, event: Option<Event>) {
        let states = keepsakes.iter().map(|it| it.state.as_ref().map_or(0, Vec::len));
        let bytes =
            states.map(|state| state + KEEPSAKE_HEADER).sum::<usize>() + event.as_ref().map_or(0, |_| EVENT);
        if self.bytes > 0 && self.bytes + bytes > MAX_NEWS {
            self.all.push(CmNews::default());
            self.bytes = 0;
        }
        self.bytes += bytes;
        let last = self.last();
        last.keepsakes.extend(keepsakes);
        last.events.extend(event);
    }
}

/// The ids that an event is about.
fn ids_of(event: &Event) -> impl Iterator<Item = Id> + use<> {
    std::iter::once(event.id).chain(event.new_id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferroce_engine::control::protocol::{Reply, encode};
    use ferroce_engine::rdma_cm::{Answer, Details, Ece, EventKind, Parameters};

    fn event(id: Id, new_id: Option<Id>) -> Event {
        Event {
            id,
            kind: EventKind::ConnectRequest,
            status: 0,
            details: Details::Connection(Parameters {
                private_data: vec![7; 255],
                ..Parameters::default()
            }),
            ece: Ece::default(),
            new_id,
            membership: None,
        }
    }

    fn answer() -> CmAnswer {
        let result = Ok(Answer::Done);
        CmAnswer { sequence: 5, result }
    }

    #[test]
    fn a_step_is_one_message() {
        let news = News {
            answer: Some(answer()),
            events: vec![event(1, Some(2))],
            states: BTreeMap::from([(1, Some(vec![1])), (2, Some(vec![2])), (3, None)]),
        };
        let messages = news.into_messages();
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].answer, Some(answer()));
        assert_eq!(messages[0].events, [event(1, Some(2))]);
        let mut ids: Vec<Id> = messages[0].keepsakes.iter().map(|it| it.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [1, 2, 3]);
    }

    #[test]
    fn what_is_too_much_for_one_message_is_parted_between_events() {
        let states = (1..=3000).map(|id| (id, Some(vec![0; 300])));
        let news = News {
            answer: Some(answer()),
            events: (1001..=2000).map(|id| event(id, Some(id + 1000))).collect(),
            states: states.collect(),
        };
        let messages = news.into_messages();
        assert!(messages.len() > 10);
        let answers: Vec<usize> = (0..messages.len())
            .filter(|at| messages[*at].answer.is_some())
            .collect();
        let without: Vec<usize> = (0..messages.len())
            .filter(|at| messages[*at].keepsakes.iter().any(|it| it.id <= 1000))
            .collect();
        assert_eq!(answers.as_slice(), &without[without.len() - 1..]);
        let mut events = 0;
        let mut kept = 0;
        for message in &messages {
            for event in &message.events {
                events += 1;
                assert_eq!(event.id, 1000 + events, "in their order");
                for id in ids_of(event) {
                    assert!(
                        message.keepsakes.iter().any(|it| it.id == id),
                        "the state of {id} comes along"
                    );
                }
            }
            kept += message.keepsakes.len();
            assert!(encode(&Reply::CmNews(message.clone())).len() <= MAX_MESSAGE);
        }
        assert_eq!((events, kept), (1000, 3000));
    }
}

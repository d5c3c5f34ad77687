//! What one session of RDMA CM is to be told at once: in one message, or if that is too much in some that may each be the
//! last one.

use std::collections::{BTreeMap, BTreeSet};

use ferroce_engine::control::protocol::{CmAnswer, CmNews, MAX_MESSAGE};
use ferroce_engine::rdma_cm::{Event, Id, Keepsake};

/// Bytes of what is counted in one message: half of what one may have.
const MAX_NEWS: usize = MAX_MESSAGE / 2;
/// More than the bytes of a keepsake beside its state.
const KEEPSAKE_HEADER: usize = 16;
/// More than the bytes of an event: its private data is that of a MAD.
const EVENT: usize = 512;

/// What is lined up for a session, in steps: in each, the states are those after its events.
#[derive(Default)]
pub struct News {
    answer: Option<CmAnswer>,
    steps: Vec<Step>,
}

#[derive(Default)]
struct Step {
    states: BTreeMap<Id, Option<Vec<u8>>>,
    events: Vec<Event>,
    /// The ids that the events are about.
    told: BTreeSet<Id>,
}

/// Messages, the last of which has still room.
struct Messages {
    all: Vec<CmNews>,
    bytes: usize,
}

impl News {
    /// What a command gave: comes before all events.
    pub fn answer(&mut self, answer: CmAnswer) {
        self.answer = Some(answer);
    }

    /// The state of an id, as the events to come find it.
    pub fn keep(&mut self, Keepsake { id, state }: Keepsake) {
        if self.steps.last().is_none_or(|step| step.told.contains(&id)) {
            self.steps.push(Step::default());
        }
        if let Some(step) = self.steps.last_mut() {
            step.states.insert(id, state);
        }
    }

    /// Something happened; the states that go with it were kept before.
    pub fn tell(&mut self, event: Event) {
        if self.steps.is_empty() {
            self.steps.push(Step::default());
        }
        if let Some(step) = self.steps.last_mut() {
            step.told.extend(ids_of(&event));
            step.events.push(event);
        }
    }

    /// The messages, in the order in which they are to be read: as a rule one. Of several, each has with an event the states
    /// of its ids, and the answer comes after all of its step that has no event: if the daemon dies in between, the next
    /// one finds nothing that has come without what it led to.
    pub fn into_messages(mut self) -> Vec<CmNews> {
        let mut messages = Messages {
            all: vec![CmNews::default()],
            bytes: 0,
        };
        if self.steps.is_empty() {
            self.steps.push(Step::default());
        }
        for Step { states, events, told } in self.steps {
            let is_told = |(id, _): &(Id, _)| told.contains(id);
            let (mut of_events, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
                states.into_iter().partition(is_told);
            for (id, state) in others {
                messages.add(vec![Keepsake { id, state }], None);
            }
            if let Some(answer) = self.answer.take() {
                messages.last().answer = Some(answer);
            }
            for event in events {
                let of_event =
                    ids_of(&event).filter_map(|id| of_events.remove(&id).map(|state| Keepsake { id, state }));
                messages.add(of_event.collect(), Some(event));
            }
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

    fn state(id: Id, bytes: usize) -> Keepsake {
        let state = Some(vec![id as u8; bytes]);
        Keepsake { id, state }
    }

    #[test]
    fn what_happened_at_once_is_one_message() {
        let mut news = News::default();
        news.keep(state(1, 10));
        news.keep(state(2, 10));
        news.keep(Keepsake { id: 3, state: None });
        news.tell(event(1, Some(2)));
        news.keep(state(2, 20));
        news.tell(event(2, None));
        news.answer(answer());
        let messages = news.into_messages();
        let [message] = messages.as_slice() else {
            panic!("{messages:?}")
        };
        assert_eq!(message.answer, Some(answer()));
        assert_eq!(message.events, [event(1, Some(2)), event(2, None)]);
        // Who keeps them in this order has the last of each.
        let last = Keepsake { id: 3, state: None };
        assert_eq!(
            message.keepsakes,
            [last, state(1, 10), state(2, 10), state(2, 20)]
        );
    }

    #[test]
    fn an_answer_alone_is_a_message() {
        let mut news = News::default();
        news.answer(answer());
        let messages = news.into_messages();
        assert_eq!(messages.len(), 1);
        assert_eq!(messages[0].answer, Some(answer()));
    }

    /// Whatever message is the last that comes, the states that it leaves are those of the events that have come.
    #[test]
    fn what_is_too_much_for_one_message_is_parted_between_events() {
        let mut news = News::default();
        for id in 1..=1000 {
            news.keep(state(id, 300));
        }
        news.answer(answer());
        // A listener whose state changes with each request, and ids that are told of twice.
        for step in 1..=1000 {
            news.keep(state(5000, step as usize % 300));
            news.keep(state(1000 + step, 300));
            news.tell(event(5000, Some(1000 + step)));
        }
        for step in 1..=1000 {
            news.keep(state(1000 + step, 200));
            news.tell(event(1000 + step, None));
        }
        let messages = news.into_messages();
        assert!(messages.len() > 10);
        let mut kept = BTreeMap::new();
        let (mut events, mut answers) = (0, 0);
        for message in &messages {
            assert!(encode(&Reply::CmNews(message.clone())).len() <= MAX_MESSAGE);
            kept.extend(message.keepsakes.iter().map(|it| (it.id, it.state.clone())));
            if message.answer.is_some() {
                answers += 1;
                assert_eq!(events, 0);
                assert!(
                    (1..=1000).all(|id| kept.contains_key(&id)),
                    "all that has no event came before"
                );
            }
            events += message.events.len();
            let bytes = |id: Id| kept.get(&id).and_then(Option::as_ref).map(Vec::len);
            if let requests @ 1..=1000 = events {
                assert_eq!(bytes(5000), Some(requests % 300));
            }
            for at in 1..=1000 {
                let expected = match events {
                    _ if at + 1000 <= events => Some(200),
                    _ if at <= events => Some(300),
                    _ => None,
                };
                assert_eq!(bytes(1000 + at as Id), expected, "after {events} events");
            }
        }
        assert_eq!((events, answers), (2000, 1));
    }
}

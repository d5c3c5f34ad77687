//! What the programs of a run do, and what the network and fate do to them.

use std::time::Duration;

use ferroce_engine::link::random::Prng;

/// What two programs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// They connect, and the one who asked ends it.
    AskerEnds,
    /// They connect, and the one who was asked ends it.
    AskedEnds,
    /// They connect, and end it at once.
    BothEnd,
    /// They connect, and the one who asked dies.
    AskerDies,
    /// They connect, and the one who was asked dies.
    AskedDies,
    /// Each connects to the other.
    Crossing,
    /// The one who is asked takes its time; the peer asks again, and then waits.
    SlowAsked,
    /// The one who asked takes its time to be ready.
    SlowAsker,
    /// Both ask the other for patience at once.
    Patience,
    /// Data comes before the message that the peer is ready.
    DataFirst,
    /// The one who is asked refuses.
    Rejected,
    /// Nobody listens.
    NoListener,
    /// The one who asked refuses the reply.
    ReplyRejected,
    /// The one who asked gives up before the reply.
    AskerGivesUp,
    /// The one who was asked replies, and gives up.
    AskedWithdraws,
    /// A datagram service answers.
    Sidr,
    /// Nobody has the datagram service.
    SidrRefused,
}

use Scenario::*;

impl Scenario {
    pub const ALL: [Scenario; 17] = [
        AskerEnds,
        AskedEnds,
        BothEnd,
        AskerDies,
        AskedDies,
        Crossing,
        SlowAsked,
        SlowAsker,
        Patience,
        DataFirst,
        Rejected,
        NoListener,
        ReplyRejected,
        AskerGivesUp,
        AskedWithdraws,
        Sidr,
        SidrRefused,
    ];

    /// Whether the programs are to be connected.
    pub fn connects(self) -> bool {
        !matches!(
            self,
            Rejected | NoListener | ReplyRejected | AskerGivesUp | AskedWithdraws | Sidr | SidrRefused
        )
    }

    /// How long the programs themselves take until it is decided.
    pub fn thinking(self) -> Duration {
        match self {
            SlowAsked | SlowAsker => Duration::from_secs(20),
            Patience => Duration::from_secs(40),
            _ => Duration::ZERO,
        }
    }
}

/// What happens to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is lost.
    Lost,
    /// It comes twice.
    Doubled,
    /// It comes again, much later.
    DoubledLate,
    /// Others overtake it.
    Overtaken,
    /// It comes when it has been sent again.
    Late,
    /// The connection manager of who sends it dies, and another goes on.
    SenderRestarts,
    /// So does that of who gets it.
    ReceiverRestarts,
}

impl Fault {
    pub const ALL: [Fault; 7] = [
        Fault::Lost,
        Fault::Doubled,
        Fault::DoubledLate,
        Fault::Overtaken,
        Fault::Late,
        Fault::SenderRestarts,
        Fault::ReceiverRestarts,
    ];
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is done, from when, and whether the second host asks.
    pub scenarios: Vec<(Scenario, Duration, bool)>,
    /// What happens to the messages, by their number.
    pub faults: Vec<(usize, Fault)>,
}

impl Plan {
    pub fn of(scenario: Scenario) -> Plan {
        Plan {
            scenarios: vec![(scenario, Duration::ZERO, false)],
            faults: Vec::new(),
        }
    }

    pub fn with(&self, faults: &[(usize, Fault)]) -> Plan {
        Plan {
            faults: faults.to_vec(),
            ..self.clone()
        }
    }

    pub fn random(seed: u64) -> Plan {
        let mut prng = Prng::new(seed);
        let scenarios = (0..prng.between(1, 6))
            .map(|_| {
                let scenario = Scenario::ALL[prng.below(17) as usize];
                let start = Duration::from_millis(prng.below(2) * prng.below(20_000));
                (scenario, start, prng.below(2) == 1)
            })
            .collect();
        let faults = (0..prng.below(30))
            .map(|_| {
                let fault = Fault::ALL[prng.below(7) as usize];
                (prng.below(50) as usize, fault)
            })
            .collect();
        Plan { scenarios, faults }
    }

    /// What happens to a message.
    pub fn faults_at(&self, message: usize) -> impl Iterator<Item = Fault> {
        let here = move |&&(at, _): &&(usize, Fault)| at == message;
        self.faults.iter().filter(here).map(|&(_, fault)| fault)
    }

    /// Plans with a little less in them.
    pub fn simpler(&self) -> Vec<Plan> {
        let without_scenario = (0..self.scenarios.len()).map(|at| {
            let mut plan = self.clone();
            plan.scenarios.remove(at);
            plan
        });
        let without_fault = (0..self.faults.len()).map(|at| {
            let mut plan = self.clone();
            plan.faults.remove(at);
            plan
        });
        let at_once = (0..self.scenarios.len()).filter_map(|at| {
            let mut plan = self.clone();
            let start = std::mem::take(&mut plan.scenarios.get_mut(at)?.1);
            (!start.is_zero()).then_some(plan)
        });
        without_scenario.chain(without_fault).chain(at_once).collect()
    }
}

//! The gateway's fleet without its HTTP and its engines, for programs that measure what requests wait for.

use std::sync::Arc;

use baton_kv::{Applied, KvEventBatch};
use baton_policy::{Arrival, Outcome, Placed, ReplicaSpec, Verdict};
use baton_units::{Incarnation, ReplicaId, RequestId};

use crate::{
    config::{FrontConfig, PolicyConfig},
    fleet::{Fleet, Placing},
};

#[derive(Debug, Clone)]
pub struct Placements(Arc<Fleet>);

impl Placements {
    /// A fleet of these replicas, all ready.
    pub fn new(policy: &PolicyConfig, replicas: impl IntoIterator<Item = ReplicaSpec>) -> Self {
        let fleet = Fleet::new(FrontConfig::default(), policy);
        for spec in replicas {
            fleet.engine_ready(spec, None);
        }
        Self(Arc::new(fleet))
    }

    /// Where a request would be sent now; `None` for one that is held or refused.
    pub fn place(&self, arrival: Arrival) -> Option<ReplicaId> {
        match self.0.place(arrival) {
            Placing::Now(Verdict::Run(Placed { replica, .. })) => Some(replica),
            Placing::Now(Verdict::Hold | Verdict::Refuse(_)) | Placing::Later(_) => None,
        }
    }

    /// The request ended well.
    pub fn finish(&self, request: RequestId) {
        self.0.finished(request, Outcome::Finished, None);
    }

    /// Takes in a batch of a replica's events, as whoever follows them does.
    pub async fn kv_events(&self, id: ReplicaId, life: Incarnation, batch: KvEventBatch) -> Applied {
        self.0.kv_events(id, life, batch).await
    }

    /// Makes the snapshots of the replicas, as before they are written to a file; returns their bytes. Blocks.
    pub fn snapshot(&self, replicas: &[ReplicaId]) -> usize {
        let mut copying = self.0.copy_index(replicas);
        replicas.iter().filter_map(|id| copying.take(*id)).map(|bytes| bytes.len()).sum()
    }
}

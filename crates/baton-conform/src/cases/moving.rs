use baton_migration::OwnersInput;
use baton_wire::migration::RunRequest;

use crate::{
    Checked, Suite,
    fleet::Fleet,
    verdict::{demand, skipped},
};

async fn travels(suite: &Suite, spec: &RunRequest, to_and_fro: bool) -> Checked {
    let alone = suite.alone(spec).await?;
    let mut fleet = Fleet::attached(suite).await?;
    let stops = [fleet.peer, fleet.replica, fleet.peer];
    let stops = if to_and_fro { &stops[..] } else { &stops[..1] };
    let sequence = fleet.travels(spec, stops).await?;
    let request = fleet.request(sequence);
    suite.same(&request.delivered, &alone)?;
    demand!(request.scheduled == [fleet.replica], "SCHEDULED came from {:?}, and {} computed the prompt", request.scheduled, fleet.replica);
    let moves = request.moved.len();
    demand!(moves == stops.len(), "MOVED came {moves} times, and {} moves were made", stops.len());
    Ok(())
}

pub(super) async fn greedy(suite: &Suite) -> Checked {
    travels(suite, &suite.greedy(suite.options.output), false).await
}

pub(super) async fn sampled(suite: &Suite) -> Checked {
    travels(suite, &suite.sampled(suite.options.output), false).await
}

pub(super) async fn to_and_fro(suite: &Suite) -> Checked {
    travels(suite, &suite.sampled(suite.options.output), true).await
}

pub(super) async fn held(suite: &Suite) -> Checked {
    let mut fleet = Fleet::attached(suite).await?;
    // A salt of its own, so that the first move finds nothing.
    let salt = format!("{:x}", crate::suite::random()?);
    let spec = RunRequest { salt: Some(salt), ..suite.greedy(suite.options.output) };
    let stops = [fleet.peer];
    let mut copies = Vec::new();
    for _ in 0..2 {
        let sequence = fleet.travels(&spec, &stops).await?;
        copies.extend(fleet.request(sequence).moved.clone());
    }
    let [first, second] = copies[..] else { return skipped("the replica does not say what its moves took") };
    if second.held == 0 {
        return skipped("the peer keeps no prefix");
    }
    demand!(first.held == 0, "{} blocks were held of a prefix that was never there", first.held);
    demand!(
        second.bytes < first.bytes,
        "{} bytes were sent though {} blocks were held, and {} where none was",
        second.bytes,
        second.held,
        first.bytes
    );
    Ok(())
}

pub(super) async fn cancelled(suite: &Suite) -> Checked {
    let mut fleet = Fleet::attached(suite).await?;
    let spec = suite.greedy(suite.options.output);
    for sequence in 1..=5 {
        fleet.start(sequence, &spec).await?;
        fleet.delivered(sequence, 3).await?;
        let peer = fleet.peer;
        fleet.opens(sequence, peer).await?;
        fleet.tell(OwnersInput::End { sequence }).await?;
        fleet.until("both say STOPPED", |fleet| fleet.request(sequence).forgotten).await?;
    }
    Ok(())
}

pub(super) async fn pools(suite: &Suite) -> Checked {
    if suite.reports.is_empty() {
        return skipped("no --http was given");
    }
    suite.is_empty().await
}

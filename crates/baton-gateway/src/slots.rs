//! Slots of llama.cpp's server: which one computes which stream, and how the KV of one gets to another server, by a file that the one writes
//! (`/slots/N?action=save`) and the other one reads.

use std::{path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{
    engine::Engine,
    upstream::{FetchError, Upstream},
};

/// A slot is saved when what runs in it has noticed that its client left, and a file is written and read at some GB/s.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Tokens that every vocabulary has.
const PROBE: [u32; 16] = [20, 21, 22, 23, 24, 25, 26, 27, 20, 22, 24, 26, 21, 23, 25, 27];
const PROBE_TOKENS: u32 = 4;

/// What an engine's slots hold, as far as this gateway knows.
#[derive(Debug, Default)]
pub(crate) struct Slots(Vec<Held>);

#[derive(Debug, Default)]
struct Held {
    is_busy: bool,
    /// Of the last stream there.
    tokens: Vec<u32>,
}

/// A slot that is one stream's; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    engine: Arc<Engine>,
    pub(crate) number: u32,
    /// What lies there.
    tokens: Vec<u32>,
}

/// Why a slot's KV is not at another server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CarryError {
    #[error("saving the slot: {0}")]
    Save(FetchError),
    #[error("copying {0}: {1}")]
    Copy(PathBuf, std::io::Error),
    #[error("restoring the slot: {0}")]
    Restore(FetchError),
}

impl Slots {
    /// The free one that has most of these tokens, of `count`.
    fn take(&mut self, count: usize, tokens: &[u32]) -> Option<usize> {
        self.0.resize_with(count, Held::default);
        let shared = |held: &Held| held.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        // Where none has any, the emptiest: what the others hold may be asked for again.
        let free = self.0.iter().enumerate().filter(|(_, held)| !held.is_busy);
        let (best, _) = free.max_by_key(|(_, held)| (shared(held), usize::MAX - held.tokens.len()))?;
        self.0[best].is_busy = true;
        Some(best)
    }

    pub(crate) fn busy(&self) -> usize {
        self.0.iter().filter(|held| held.is_busy).count()
    }

    fn give_back(&mut self, number: usize, tokens: Vec<u32>) {
        if let Some(held) = self.0.get_mut(number) {
            *held = Held { is_busy: false, tokens };
        }
    }
}

impl Slot {
    /// One for a stream of this prompt and output so far. `None` where the engine chooses by itself: where its slots do not travel, where all are taken, and
    /// as long as it runs what chose none, since nobody knows where that is.
    pub(crate) fn take(engine: &Arc<Engine>, (prompt, output): (&[u32], &[u32])) -> Option<Self> {
        let count = {
            let facts = engine.facts();
            facts.spec.filter(|_| facts.carries_slots)?.max_running
        };
        let mut slots = engine.slots();
        if engine.lines.busy() as usize > slots.busy() {
            return None;
        }
        let tokens = [prompt, output].concat();
        let number = slots.take(count as usize, &tokens)? as u32;
        drop(slots);
        Some(Self { engine: engine.clone(), number, tokens })
    }

    pub(crate) fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    fn path(&self, file: &str) -> PathBuf {
        self.engine.config.slot_path.clone().unwrap_or_default().join(file)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let tokens = std::mem::take(&mut self.tokens);
        self.engine.slots().give_back(self.number as usize, tokens);
    }
}

#[derive(Deserialize)]
struct Saved {
    n_written: u64,
}

#[derive(Deserialize)]
struct Restored {
    n_restored: u64,
}

async fn act<T: DeserializeOwned>(
    upstream: &Upstream,
    engine: &Engine,
    slot: u32,
    action: &str,
    file: Option<&str>,
) -> Result<T, FetchError> {
    let body = file.map_or_else(|| json!({}), |file| json!({ "filename": file }));
    let answer = upstream.post(engine, &format!("/slots/{slot}?action={action}"), Bytes::from(body.to_string()), TIMEOUT).await?;
    serde_json::from_slice(&answer).map_err(|error| FetchError::Unreadable(error.to_string()))
}

/// Brings what lies in the one slot into the other one; gives how many bytes that are.
pub(crate) async fn carry(upstream: &Upstream, from: &Slot, to: &Slot) -> Result<u64, CarryError> {
    let file = format!("baton-{:016x}.bin", fastrand::u64(..));
    let (written, read) = (from.path(&file), to.path(&file));
    let carried = async {
        let saved: Saved = act(upstream, &from.engine, from.number, "save", Some(&file)).await.map_err(CarryError::Save)?;
        if written != read {
            tokio::fs::copy(&written, &read).await.map_err(|error| CarryError::Copy(written.clone(), error))?;
        }
        let restored: Restored = act(upstream, &to.engine, to.number, "restore", Some(&file)).await.map_err(CarryError::Restore)?;
        tracing::debug!(tokens = restored.n_restored, bytes = saved.n_written, "a slot was carried");
        Ok(saved.n_written)
    };
    let carried = carried.await;
    for path in [written, read] {
        // Where the two are one, or it came to nothing, there is none.
        let _ = tokio::fs::remove_file(path).await;
    }
    carried
}

/// Whether the engine goes on from a slot that was saved and restored as it goes on from tokens that it computes: there are builds that do
/// not. Tried out in its first slot, with a few tokens.
pub(crate) async fn travel(upstream: &Upstream, engine: &Engine) -> Result<bool, FetchError> {
    #[derive(Deserialize)]
    struct Answer {
        tokens: Vec<u32>,
        timings: Timings,
    }
    #[derive(Deserialize)]
    struct Timings {
        prompt_n: i64,
    }
    let ask = async |tokens: &[u32]| -> Result<Answer, FetchError> {
        let body = json!({ "prompt": tokens, "n_predict": PROBE_TOKENS, "temperature": 0, "id_slot": 0, "cache_prompt": true, "return_tokens": true });
        let answer = upstream.post(engine, "/completion", Bytes::from(body.to_string()), TIMEOUT).await?;
        serde_json::from_slice(&answer).map_err(|error| FetchError::Unreadable(error.to_string()))
    };
    let file = format!("baton-{:016x}.bin", fastrand::u64(..));
    let begun = ask(&PROBE).await?;
    let so_far = [&PROBE[..], &begun.tokens[..]].concat();
    act::<Saved>(upstream, engine, 0, "save", Some(&file)).await?;
    act::<Value>(upstream, engine, 0, "erase", None).await?;
    let restored = act::<Restored>(upstream, engine, 0, "restore", Some(&file)).await;
    if let Some(folder) = &engine.config.slot_path {
        // One that is elsewhere is not seen from here, and then nothing can be carried.
        tokio::fs::remove_file(folder.join(&file))
            .await
            .map_err(|error| FetchError::Unreadable(format!("{}: {error}", folder.display())))?;
    }
    restored?;
    let carried = ask(&so_far).await?;
    act::<Value>(upstream, engine, 0, "erase", None).await?;
    let computed = ask(&so_far).await?;
    // The last token is computed in any case.
    Ok(carried.tokens == computed.tokens && carried.timings.prompt_n < computed.timings.prompt_n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_gets_the_free_slot_that_has_most_of_it() {
        let mut slots = Slots::default();
        assert_eq!(slots.take(3, &[1, 2]), Some(2));
        assert_eq!(slots.take(3, &[5]), Some(1));
        slots.give_back(2, vec![1, 2, 3]);
        slots.give_back(1, vec![5, 6]);
        assert_eq!(slots.take(3, &[5, 6, 7]), Some(1), "it has two of them");
        assert_eq!(slots.take(3, &[9]), Some(0), "nothing is lost where nothing was");
        assert_eq!(slots.take(3, &[5]), Some(2));
        assert_eq!(slots.take(3, &[5]), None);
        slots.give_back(0, Vec::new());
        assert_eq!(slots.take(3, &[]), Some(0));
    }
}

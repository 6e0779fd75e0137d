//! What one cache would have held of a trace's prompts: the bound that routing and memory leave to be had.

use std::{collections::HashSet, sync::Arc};

use baton_kv::{BlockKey, CacheDomain, KeyDomain, KvPool};
use baton_units::{BlockSize, Blocks};

use crate::Trace;

/// Share of the prompts' tokens that are found in a cache of `capacity` blocks of the trace, all of them where it is `None`; `None` of a trace
/// that does not tell what prompts share.
///
/// Prompts come in order, each is in the cache when the next one comes, and nothing takes time. The cache is the engine's own
/// [`KvPool`], so that what it evicts is what a replica would. A prompt that is larger than
/// all of it leaves nothing behind.
pub fn hit_rate(trace: &Trace, capacity: Option<Blocks>) -> Option<f64> {
    let size = trace.block_size()?;
    let domain = Arc::new(CacheDomain::new(KeyDomain { model: "", adapter: None, salt: None }));
    let keys: Vec<Vec<BlockKey>> = trace.requests().iter().map(|request| domain.keys(trace.blocks(request), BlockSize::ONE)).collect();
    // A name behind another beginning is another block. A cache of all of them evicts nothing, and a larger one is no better.
    let all = keys.iter().flatten().collect::<HashSet<_>>().len() as u32;
    let capacity = capacity.map_or(all, |Blocks(blocks)| blocks.min(all));
    let mut pool = KvPool::with_names(Blocks(capacity), size).without_events();
    let mut found_tokens = 0;
    for (request, keys) in trace.requests().iter().zip(&keys) {
        let names = trace.blocks(request);
        let found = pool.find_prefix(&domain, keys, names, Blocks(u32::MAX));
        let known = found.len();
        found_tokens += u64::from(known.to_tokens(size).min(request.prompt).0);
        let mut table = pool.take_prefix(found);
        // Blocks that are cached are not written.
        let new = known.to_tokens(size).0..Blocks(names.len() as u32).to_tokens(size).0;
        if new.is_empty() || pool.reserve(&mut table, new, &mut Vec::new()).is_ok() {
            pool.commit(&mut table, keys, names);
        }
        pool.release(table);
    }
    Some(found_tokens as f64 / trace.prompt_tokens().max(1) as f64)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn trace(prompts: &[Vec<u32>]) -> Trace {
        let line = |(place, names): (usize, &Vec<u32>)| {
            format!(r#"{{"timestamp":{place},"input_length":{},"output_length":1,"hash_ids":{names:?}}}"#, names.len() * 512)
        };
        let lines: Vec<String> = prompts.iter().enumerate().map(line).collect();
        Trace::read(lines.join("\n").as_bytes()).unwrap()
    }

    /// Prompts whose names are those of chains: an equal name has an equal name in front of it.
    fn chained(prompts: Vec<Vec<u8>>) -> Vec<Vec<u32>> {
        let mut names = std::collections::BTreeMap::new();
        let chain = |prompt: Vec<u8>| {
            (1..=prompt.len())
                .map(|end| {
                    let next = names.len() as u32;
                    *names.entry(prompt[..end].to_vec()).or_insert(next)
                })
                .collect()
        };
        prompts.into_iter().map(chain).collect()
    }

    /// The same by a list in order of use, from the tail of each prompt.
    fn by_list(prompts: &[Vec<u32>], capacity: usize) -> f64 {
        let (mut cached, mut found) = (VecDeque::new(), 0);
        for prompt in prompts {
            found += prompt.iter().take_while(|name| cached.contains(*name)).count();
            for name in prompt.iter().rev() {
                cached.retain(|other| other != name);
                cached.push_back(*name);
            }
            while cached.len() > capacity {
                cached.pop_front();
            }
        }
        found as f64 / prompts.iter().map(Vec::len).sum::<usize>().max(1) as f64
    }

    #[test]
    fn a_prompt_finds_what_came_before_as_far_as_it_is_the_same() {
        let prompts = trace(&[vec![0, 1, 2], vec![0, 1, 3, 4], vec![5], vec![0, 1, 2]]);
        assert_eq!(hit_rate(&prompts, None), Some(5.0 / 11.0));
        // The second prompt's tail goes first, then the first one's.
        assert_eq!(hit_rate(&prompts, Some(Blocks(4))), Some(4.0 / 11.0));
        assert_eq!(hit_rate(&prompts, Some(Blocks(1))), Some(0.0));
    }

    #[test]
    fn a_name_behind_another_beginning_is_another_block() {
        let prompts = trace(&[vec![0, 1], vec![2, 1], vec![0, 1], vec![2, 1]]);
        assert_eq!((prompts.distinct_blocks(), hit_rate(&prompts, None)), (3, Some(0.5)));
        assert_eq!(hit_rate(&prompts, Some(Blocks(u32::MAX))), Some(0.5), "no more memory is taken than can be used");
    }

    #[test]
    fn a_block_in_part_counts_for_what_it_has() {
        let line = r#"{"timestamp":0,"input_length":700,"output_length":1,"hash_ids":[7,9]}"#;
        let twice = Trace::read(format!("{line}\n{line}").as_bytes()).unwrap();
        assert_eq!(hit_rate(&twice, None), Some(0.5));
    }

    #[test]
    fn lengths_alone_have_no_rate() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n";
        assert_eq!(hit_rate(&Trace::read(azure.as_bytes()).unwrap(), None), None);
    }

    proptest! {
        #[test]
        fn the_pool_evicts_as_a_list_by_last_use_does(
            prompts in prop::collection::vec(prop::collection::vec(0u8..3, 1..6), 1..60),
            spare in 0usize..20,
        ) {
            let prompts = chained(prompts);
            // No prompt is larger than the cache.
            let capacity = 6 + spare;
            let rate = hit_rate(&trace(&prompts), Some(Blocks(capacity as u32))).unwrap();
            prop_assert!((rate - by_list(&prompts, capacity)).abs() < 1e-9);
        }
    }
}

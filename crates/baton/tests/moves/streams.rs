//! Requests that are moved while they run answer as those that are not.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value, json};

use crate::{
    client::{Answer, Ask},
    common::until,
    fleet::{Fleet, Make, Ordered, counter},
};

const REPLICAS: usize = 3;
/// Moves that must have happened at the end.
const MOVES: usize = 100;
/// Clients at once.
const LANES: usize = 3;
/// So many requests at most until there were enough moves; each is asked for several.
const ASKS_MAX: usize = 80;

/// What is asked in turns: every way in which an answer can depend on what came before it.
fn asks(fleet: &Fleet, round: u64) -> Vec<Ask> {
    let seed = round * 100;
    let story = |about: &str| Ask::chat(&format!("Story {round}: {about}. Write it long."), 48);
    let penalties = json!({"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2});
    vec![
        story("a fox and the sea"),
        story("two old friends").sampled(seed + 1),
        story("a storm").with(json!({"logprobs": true, "top_logprobs": 3})).sampled(seed + 2),
        story("a circle of words").with(penalties),
        story("a list of fruits").with(json!({"n": 2})).sampled(seed + 3),
        Ask::completion(&format!("In the year {round}, the"), 48).with(json!({"logprobs": 2})),
        Ask::completion("One, two, three,", 48).sampled(seed + 4).whole(),
        emoji(fleet, round),
        several(round).sampled(seed + 6),
        several(round).sampled(seed + 7).whole(),
        // Ends by one of the commonest words, but not before its time.
        story("a garden").with(json!({"ignore_eos": false, "min_tokens": 30, "stop_token_ids": ids_of(fleet, " the")})),
        story("a machine").with(json!({"logit_bias": {ids_of(fleet, " dog")[0].to_string(): 4.0}})).sampled(seed + 5),
    ]
}

/// Two prompts with two choices each: four sequences.
fn several(round: u64) -> Ask {
    Ask::completion("", 24).with(json!({"prompt": [format!("In the year {round}, the"), "One, two, three,"], "n": 2}))
}

/// Characters of several tokens each, whole ones and torn ones, so that cutovers fall within them.
fn emoji(fleet: &Fleet, round: u64) -> Ask {
    let bias: Map<_, _> = ids_of(fleet, "🦊🐙🌋").into_iter().map(|id| (id.to_string(), json!(100))).collect();
    Ask::completion(&format!("{round} 🦊🐙🌋🦊🐙🌋🦊🐙🌋"), 48).with(json!({ "logit_bias": bias })).sampled(round)
}

fn ids_of(fleet: &Fleet, text: &str) -> Vec<u64> {
    let (status, body) = fleet.replicas[0].post("/tokenize", &json!({"prompt": text, "add_special_tokens": false}));
    assert_eq!(status, 200, "{body}");
    let tokens = serde_json::from_str::<Value>(&body).unwrap()["tokens"].clone();
    serde_json::from_value(tokens).unwrap()
}

/// Sends it through the gateway and has it moved again and again, at random output counts. Gives the moves that were made.
fn ask_and_move(fleet: &Fleet, ask: &Ask, request_id: &str, random: &mut fastrand::Rng) -> (Answer, usize) {
    let (mut moves, mut next) = (0, random.usize(1..6));
    // To be told at each output; one that stays is ordered again at its next output.
    let mut has_output = |output: usize| {
        if output >= next
            && let Ordered::Moved = fleet.migrate(request_id, random.usize(0..REPLICAS))
        {
            moves += 1;
            next = output + random.usize(1..8);
        }
    };
    let answer = if ask.body["stream"] == true {
        let mut reading = ask.send(fleet.url(), request_id);
        while reading.next() {
            has_output(reading.answer.tokens());
        }
        reading.answer
    } else {
        std::thread::scope(|scope| {
            let client = scope.spawn(|| ask.answer(fleet.url(), request_id));
            until("end of an answer in one piece", || {
                let output = fleet.request(request_id).map_or(0, |request| request["output_tokens"].as_u64().unwrap());
                has_output(output as usize);
                client.is_finished().then_some(())
            });
            client.join().unwrap()
        })
    };
    (answer, moves)
}

#[test]
fn a_hundred_random_moves_change_no_byte_of_any_answer() {
    let fleet = Make::cpu().fleet(REPLICAS);
    let kinds = asks(&fleet, 0).len();
    let (asked, computed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let moved: Vec<AtomicUsize> = (0..kinds).map(|_| AtomicUsize::new(0)).collect();
    // Which of them find room and time to move depends on the machine.
    let enough = || {
        let counts: Vec<usize> = moved.iter().map(|moves| moves.load(Ordering::Relaxed)).collect();
        counts.iter().sum::<usize>() >= MOVES && counts.iter().all(|moves| *moves > 0)
    };
    let lane = || {
        loop {
            let number = asked.fetch_add(1, Ordering::Relaxed);
            if enough() {
                return;
            }
            assert!(number < ASKS_MAX, "only {moved:?} moves");
            let ask = asks(&fleet, number as u64).swap_remove(number % kinds);
            // A replica itself, which moves nothing.
            let alone = ask.answer(&fleet.replicas[number % REPLICAS].url, "alone");
            assert!(alone.is_whole(), "{ask:?} {alone:?}");
            let mut random = fastrand::Rng::with_seed(number as u64);
            let (answer, moves) = ask_and_move(&fleet, &ask, &format!("moved-{number}"), &mut random);
            assert_eq!(answer, alone, "ask {number}: {ask:?} after {moves} moves");
            moved[number % kinds].fetch_add(moves, Ordering::Relaxed);
            computed.fetch_add(2 * answer.tokens(), Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| (0..LANES).for_each(|_| drop(scope.spawn(lane))));
    fleet.until_at_rest();
    // *One owner*: no token of the answers was computed twice.
    let generated: u64 = fleet.replicas.iter().map(|replica| counter(replica, "vllm:generation_tokens_total")).sum();
    assert_eq!(generated, computed.into_inner() as u64);
    let text = emoji(&fleet, 7).answer(&fleet.replicas[0].url, "emoji").choices[&0].text.clone();
    assert!(text.chars().filter(|char| char.len_utf8() == 4).count() > 8, "characters of several tokens: {text}");
}

/// A stop string of which the client has nothing yet when the move is ordered, and that ends behind the cut.
#[test]
fn a_stop_string_that_ends_across_a_cut_is_found() {
    const BEFORE: usize = 8;
    const STOP: usize = 32;
    let fleet = Make::cpu().fleet(REPLICAS);
    let asks = [
        Ask::chat("A song about rain. Write it long.", 60),
        Ask::chat("A song about wind. Write it long.", 60).sampled(1),
        Ask::completion("There was a town by the sea where", 60).sampled(2),
    ];
    for (number, ask) in asks.into_iter().enumerate() {
        let free = ask.answer(&fleet.replicas[0].url, "free").choices.remove(&0).unwrap();
        let ids = &free.token_ids[BEFORE..BEFORE + STOP];
        let (_, body) = fleet.replicas[0].post("/detokenize", &json!({ "tokens": ids }));
        let stop = serde_json::from_str::<Value>(&body).unwrap()["prompt"].as_str().unwrap().to_owned();
        let ask = ask.with(json!({ "stop": [stop] }));
        let alone = ask.answer(&fleet.replicas[0].url, "alone");
        let choice = &alone.choices[&0];
        assert_eq!(Some(choice.text.as_str()), free.text.find(&stop).map(|at| &free.text[..at]), "{stop:?}");
        assert_eq!((choice.finish_reason.as_deref(), choice.token_ids.len()), (Some("stop"), BEFORE + STOP));
        let id = format!("stops-{number}");
        let mut reading = ask.send(fleet.url(), &id);
        reading.read_until(BEFORE);
        let at = fleet.request(&id).unwrap()["replica"].clone();
        let to = (0..REPLICAS).find(|index| at != format!("r{index}")).unwrap();
        assert!(matches!(fleet.migrate(&id, to), Ordered::Moved));
        assert_eq!(reading.read_to_end(), alone);
    }
    fleet.until_at_rest();
}

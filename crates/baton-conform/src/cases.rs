//! The cases, in the order in which they are checked.

use crate::Case;

mod arriving;
mod attaching;
mod frames;
mod handshake;
mod leaving;
mod moving;
mod prefixes;
mod running;

macro_rules! cases {
    ($($number:literal $name:literal $run:path,)+) => {
        &[$(Case { number: $number, name: $name, run: |suite| Box::pin($run(suite)) }),+]
    };
}

/// All of them; each begins with a gateway that the replica has not seen before.
pub const CASES: &[Case] = cases![
    1 "a hello says who the replica is, and a new nonce each time" handshake::introduction,
    2 "a gateway of another version is not taken in" handshake::other_version,
    3 "a control connection is for gateways" handshake::other_roles,
    4 "a hello that cannot be read ends the connection" handshake::unreadable,
    5 "who has another key is not taken in, and learns no proof" handshake::wrong_key,
    6 "who has a key alone, or none alone, is not taken in" handshake::one_sided_key,
    7 "a KV connection is for sources" handshake::kv_roles,
    10 "a gap in the sequence ends the connection" frames::gap,
    11 "a repeated sequence ends the connection" frames::repetition,
    12 "a frame that is not authentic ends the connection" frames::bad_mac,
    13 "a frame that is too long ends the connection before its body comes" frames::oversized,
    14 "a frame of an unknown kind ends the connection" frames::unknown_kind,
    15 "a body that cannot be read ends the connection" frames::malformed,
    16 "what names another gateway's request is not heard" frames::foreign,
    17 "a KV connection that begins with anything but OPEN ends" frames::kv_first,
    20 "a request runs from START to its finish, which is an entry" running::start_to_finish,
    21 "SCHEDULED comes once, before the first OUTPUT" running::scheduled,
    22 "the same START again brings the entries again" running::start_again,
    23 "a START below what runs is LOST, and what runs goes on" running::older_start,
    24 "a START with entries goes on after them: greedy" running::continues_greedy,
    25 "a START with entries goes on after them: sampled by a seed" running::continues_sampled,
    26 "a START under a higher epoch goes on with what is there" running::higher_epoch,
    27 "a START whose entries differ goes on from those" running::other_entries,
    28 "a START whose entries are complete brings the finish" running::complete,
    29 "KEEP goes on and brings the entries from there again" running::keep,
    30 "KEEP of what is not held is LOST, and its epoch is over" running::keep_nothing,
    31 "what cannot be run is LOST with a class and a reason" running::cannot_run,
    32 "a request that nobody acknowledges stands, and goes on when half is" running::flow_control,
    33 "STOP ends what is tagged up to it, and nothing comes after STOPPED" running::stop,
    34 "STOP below what runs ends nothing" running::stop_below,
    35 "STOP(all) ends the request for good" running::stop_all,
    40 "heartbeats count, and tell of steps and requests" attaching::heartbeats,
    41 "a new gateway is told that nothing is held" attaching::nothing_held,
    42 "a gateway that attaches again is told what is held" attaching::held,
    43 "a newer connection closes the older one, which is not heard any more" attaching::newer_connection,
    44 "a newer incarnation closes the older one and frees its requests" attaching::newer_incarnation,
    45 "without an answered heartbeat nothing computes after 5 s, and KEEP goes on" attaching::lease_stops,
    46 "without an answered heartbeat all is freed after 15 s" attaching::lease_frees,
    50 "a source opens, plans, brings every block and all entries, and asks to commit" leaving::brings_all,
    51 "NO makes the source ask to stay, and RESUME lets it go on" leaving::no_and_resume,
    52 "a source that is not answered asks to stay" leaving::unanswered,
    53 "a source that has asked never goes on unasked, even if the target is gone" leaving::never_unasked,
    54 "a source asks again to commit when it is asked what it holds" leaving::asks_after_attach,
    55 "REFUSE ends the attempt with its reason, and the request goes on" leaving::refused,
    56 "ABORT ends the attempt, and the request goes on" leaving::aborted,
    57 "a lost KV connection ends the attempt, and the request goes on" leaving::connection_lost,
    58 "a target of another incarnation gets nothing" leaving::other_incarnation,
    59 "blocks that the target holds are not sent" leaving::held_not_sent,
    60 "no block comes without credit" leaving::credit,
    61 "an attempt is honoured once" leaving::honoured_once,
    62 "MOVE under another epoch moves nothing" leaving::other_epoch,
    63 "STOP during the copy ends it" leaving::stopped,
    64 "START under a higher epoch takes the request back from its move" leaving::taken_back,
    65 "NO during the copy ends it, and the request goes on" leaving::no_while_copying,
    66 "NO while the source stands still lets it go on, unasked by it" leaving::no_while_frozen,
    67 "NO before its MOVE is answered, and the attempt is over" leaving::no_before_move,
    68 "what is on its way is told, in each phase, to a gateway that attaches again" leaving::told_in_each_phase,
    70 "who was not announced is refused" arriving::unannounced,
    71 "another nonce, source or target is refused" arriving::wrong_opening,
    72 "other bits or another layout are refused" arriving::other_numerics,
    73 "an attempt that was stopped is refused" arriving::stopped_before,
    74 "what was brought whole is prepared, and goes on at START" arriving::whole,
    75 "STATE again is answered the same" arriving::state_again,
    76 "a prepared request is told as held" arriving::told_as_held,
    77 "blocks of a prefix that is there need not come" arriving::held_prefix,
    78 "a block with a wrong checksum ends the attempt with WITHDRAW" arriving::wrong_checksum,
    79 "a missing block ends the attempt with WITHDRAW" arriving::missing_block,
    80 "a state whose tokens are not its entries' ends the attempt with WITHDRAW" arriving::other_state,
    81 "a source that leaves before STATE makes the target ask by WITHDRAW" arriving::source_leaves,
    82 "what is prepared stays without its source until START or STOP" arriving::stays_prepared,
    83 "a source that heeds no credit is let go of, or taken whole" arriving::no_credit,
    84 "a source that says nothing keeps no other one out" arriving::silent,
    85 "other tokens under the same keys are not counted as held" arriving::other_tokens,
    86 "what may come is told, in each phase, to a gateway that attaches again" arriving::told_in_each_phase,
    90 "a moved request has the bits of one that stayed: greedy" moving::greedy,
    91 "a moved request has the bits of one that stayed: sampled, with log-probabilities" moving::sampled,
    92 "a request moves to and fro" moving::to_and_fro,
    93 "what the target holds of the prefix is not sent to it again" moving::held,
    94 "a client that leaves during the copy frees both" moving::cancelled,
    95 "whole blocks of public tokens are found under any salt, and nothing behind them" prefixes::public_tokens,
    100 "COPY brings a cached prefix to the peer, which finds it" prefixes::between_two,
    101 "COPY of what is not cached is ABORTED" prefixes::not_cached,
    102 "a holder opens, brings every block and an end, and tells what is there" prefixes::holder_brings,
    103 "COPY again is answered again, and copied once" prefixes::copied_once,
    104 "REFUSE, ABORT and a lost KV connection end a copy with ABORTED" prefixes::holder_gives_up,
    105 "STOP during a copy ends it at the holder" prefixes::holder_stops,
    106 "a prefix that comes whole is installed, and found" prefixes::target_installs,
    107 "a prefix that was not announced is refused" prefixes::unannounced,
    108 "a prefix with a missing or altered block is ABORTED, and not found" prefixes::incomplete,
    109 "STOP during a copy ends it at the target" prefixes::target_stops,
    110 "the pools are as they were" moving::pools,
];

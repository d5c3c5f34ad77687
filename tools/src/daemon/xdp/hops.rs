//! Keeps the table of next hops of every port true: routes and neighbours, as rtnetlink tells them.
